"""Where paged layers keep tokens: a pool of blocks, and who refers to which.

A pool serves all layers that hold the same positions. Block i is row i of each of its planes, one
plane an array of a layer (N blocks, H heads, block tokens, size). A plane is an evaluated device
array that is written through host memory when a round is resolved and never otherwise: no graph ever
contains a write, so graphs that are still to run, states and rows may all read the same plane.

Blocks are counted by holders: the tables of rows, and the holds of saved states. Whoever drops the
last reference may be on another thread; the owner thread books that the next time it uses the pool.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

BLANK = 0  # a block of zeros that nobody owns: what is read where a row has nothing
Key = tuple[int, str]  # layer, name of its array


def words(array: mx.array) -> mx.array:
    """The same bytes in a type that numpy has."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


class Plane:
    """One array of one layer in all blocks. `cells` is the memory of `array`, as numpy sees it."""

    def __init__(self, heads: int, tokens: int, size: int, dtype: mx.Dtype):
        self.dtype, self.shape = dtype, (heads, tokens, size)
        self.array: mx.array
        self.cells: np.ndarray[Any, Any] | None = None

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.size

    def resize(self, blocks: int) -> None:
        """New memory with the first `blocks` blocks. Graphs that read the old one keep it."""
        heads, tokens, size = self.shape
        stored = mx.uint16 if self.dtype == mx.bfloat16 else self.dtype
        array = mx.zeros((blocks * heads, tokens, size), stored)
        mx.eval(array)
        cells = np.asarray(array).reshape(blocks, *self.shape)
        if self.cells is not None:
            cells[: len(self.cells)] = self.cells[:blocks]
        self.array, self.cells = array, cells

    def __getitem__(self, blocks: Any) -> Any:
        assert self.cells is not None
        return self.cells[blocks]


class Pool:
    """Blocks of `tokens` tokens. `filled[i]` slots of block i have been written, from `low[i]` on."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.planes: dict[Key, Plane] = {}
        self.refs, self.filled, self.low = [1], [0], [0]  # BLANK
        self.copies = 0  # blocks copied because another had written on
        self._begun = 0  # rounds so far
        self._open: set[int] = set()  # those whose graphs may still read blocks
        self._late: deque[tuple[int, int]] = deque()  # rounds begun before, a block dropped since
        self._free: list[int] = []  # a heap: the lowest first, so that the end can be cut off
        self._returned: deque[Seq[int]] = deque()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    # --- size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers; 0 until something was written."""
        return sum(plane.block_bytes for plane in self.planes.values())

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        self.settle()
        return len(self.refs) - 1 - len(self._free) - len(self._late)

    def nbytes(self) -> int:
        """Device memory, free blocks included."""
        return self.block_bytes * len(self.refs) if self.planes else 0

    def reserve(self, count: int) -> None:
        """Have `count` free blocks; grows by a sixteenth at least, one plane after the other."""
        self.settle()
        missing = count - len(self._free)
        if missing > 0:
            self._resize(len(self.refs) + max(missing, len(self.refs) // 16))

    def trim(self) -> None:
        """Give memory back: all if nobody holds a block, the end if less than half is in use."""
        self.settle()
        top = max((block for block, refs in enumerate(self.refs) if refs), default=0)
        if top == BLANK:
            self.planes.clear()
        if 2 * (top + 1) <= len(self.refs):
            self._resize(top + 1 + top // 8)

    def _resize(self, blocks: int) -> None:
        for plane in self.planes.values():
            plane.resize(blocks)
        fresh = range(len(self.refs), blocks)
        for kept in (self.refs, self.filled, self.low):
            kept[blocks:] = [0] * len(fresh)
        self._free = [block for block in [*self._free, *fresh] if block < blocks]
        self._late = deque((begun, block) for begun, block in self._late if block < blocks)
        heapq.heapify(self._free)

    def plane(self, key: Key, array_BHWS: mx.array, dtype: mx.Dtype) -> Plane:
        """The plane for the words of such an array."""
        if key not in self.planes:
            plane = Plane(array_BHWS.shape[1], self.tokens, array_BHWS.shape[3], dtype)
            plane.resize(len(self.refs))
            self.planes[key] = plane
        return self.planes[key]

    # --- references

    def new(self) -> int:
        """A block of zeros with one reference."""
        self.reserve(1)
        block = heapq.heappop(self._free)
        if self.filled[block]:  # a value that is no number would get through a mask
            for plane in self.planes.values():
                plane[block][...] = 0
        self.refs[block], self.filled[block], self.low[block] = 1, 0, 0
        return block

    def copy(self, block: int, stop: int, low: int | None = None) -> int:
        """A new block with slots [low, stop) of another one."""
        low, fresh = self.low[block] if low is None else low, self.new()
        for plane in self.planes.values():
            plane[fresh][:, low:stop] = plane[block][:, low:stop]
        self.low[fresh], self.filled[fresh] = low, stop
        self.copies += 1
        return fresh

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self._late.append((self._begun, block))
        self._reclaim()

    def begin(self) -> int:
        """A round reads blocks from now on: none that it may read is given out until it has ended."""
        self._begun += 1
        self._open.add(self._begun)
        return self._begun

    def end(self, begun: int) -> None:
        self._open.discard(begun)
        self._reclaim()

    def _reclaim(self) -> None:
        oldest = min(self._open, default=self._begun + 1)
        while self._late and self._late[0][0] < oldest:
            heapq.heappush(self._free, self._late.popleft()[1])

    def enrol(self, holder: Holder) -> None:
        self._holders.add(holder)

    def give_back(self, blocks: Seq[int]) -> None:
        """From any thread."""
        self._returned.append(blocks)

    def settle(self) -> None:
        """Book what was given back."""
        while self._returned:
            self.drop(self._returned.popleft())

    def check(self) -> None:
        """Recount references, the free list and what is written. AssertionError with the numbers."""
        self.settle()
        held = Counter(block for holder in self._holders for block in holder.blocks)
        held[BLANK] += 1
        wrong = {b: (refs, held[b]) for b, refs in enumerate(self.refs) if refs != held[b]}
        assert not wrong, f"block: (counted, held) {wrong}"
        unheld = [block for block, refs in enumerate(self.refs) if not refs]
        free = sorted([*self._free, *(block for _, block in self._late)])
        assert free == unheld, f"free {free}, not held {unheld}"
        for plane in self.planes.values():
            assert len(plane[:]) == len(self.refs), (len(plane[:]), len(self.refs))
            assert not plane[BLANK].any(), "the blank block was written to"
        odd = [b for b in held if not self.low[b] <= self.filled[b] <= self.tokens]
        assert not odd, f"blocks {odd} are filled beyond themselves"


class Holder:
    """Has a reference to each of `blocks`, which must have been counted before."""

    def __init__(self, pool: Pool, blocks: Iterable[int] = ()):
        self.pool, self.blocks = pool, list(blocks)
        pool.enrol(self)

    def release(self) -> None:
        blocks, self.blocks = self.blocks, []
        self.pool.give_back(blocks)

    def __del__(self) -> None:
        self.pool.give_back(self.blocks)


class Hold(Holder):
    """Blocks that saved states refer to; the first holds positions from `base` blocks on."""

    def __init__(self, pool: Pool, blocks: Seq[int], base: int):
        pool.share(blocks)
        super().__init__(pool, blocks)
        self.base = base
        self._parts: weakref.WeakValueDictionary[tuple[int, int], Hold]
        self._parts = weakref.WeakValueDictionary()

    def part(self, first: int, stop: int) -> Hold:
        """A hold of the blocks with tokens [first, stop) only; all arrays of a segment share one."""
        low, high = first // self.pool.tokens, -(-stop // self.pool.tokens)
        if (low, high) == (self.base, self.base + len(self.blocks)):
            return self
        if (part := self._parts.get((low, high))) is None:
            part = Hold(self.pool, self.blocks[low - self.base : high - self.base], low)
            self._parts[low, high] = part
        return part


class Pages:
    """Tokens [first, stop) of one array of a layer, (heads, tokens, size), where they lie in blocks.

    Stands for an array in a saved state: it has a shape, bytes and slices, and copies nothing. Blocks
    are shared with rows; what is in them before their filled end never changes.
    """

    def __init__(self, hold: Hold, key: Key, first: int, stop: int):
        self.hold, self.key, self.first, self.stop = hold, key, first, stop
        plane = hold.pool.planes[key]
        self.dtype = plane.dtype
        self.shape = (plane.shape[0], stop - first, plane.shape[2])
        self.nbytes = int(np.prod(self.shape)) * plane.dtype.size

    def __getitem__(self, index: tuple[slice, slice]) -> Pages:
        """Only by tokens: `pages[:, low:high]`. Pins the same blocks."""
        low, high, _ = index[1].indices(self.shape[1])
        return Pages(self.hold, self.key, self.first + low, self.first + max(low, high))

    def owned(self) -> Pages:
        """The same tokens without a reference to blocks beside them."""
        return Pages(self.hold.part(self.first, self.stop), self.key, self.first, self.stop)

    def dense(self) -> mx.array:
        """An ordinary array: a copy. The blocks may be read from any thread."""
        raw = mx.array(self._cells())
        return raw.view(self.dtype) if raw.dtype != self.dtype else raw

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.dense(), dtype)

    def _cells(self) -> np.ndarray[Any, Any]:
        hold, tokens = self.hold, self.hold.pool.tokens
        low, high = self.first // tokens, -(-self.stop // tokens)
        cells = hold.pool.planes[self.key][hold.blocks[low - hold.base : high - hold.base]]
        heads, _, size = self.shape
        flat = cells.swapaxes(0, 1).reshape(heads, -1, size)
        return np.ascontiguousarray(flat[:, self.first - low * tokens : self.stop - low * tokens])
