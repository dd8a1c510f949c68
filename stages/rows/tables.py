"""The block tables of the rows of one batch, in all layers that share a pool."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from stages.rows.blocks import BLANK, Hold, Holder, Pool
from stages.rows.frame import Frame

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Table(Holder):
    """One row's blocks in the order of positions, the first one from position `base` * block on.
    The row holds positions from `start` on."""

    def __init__(self, pool: Pool, start: int = 0):
        super().__init__(pool)
        self.base, self.start = start // pool.tokens, start
        self._held: weakref.ref[Hold] | None = None

    @property
    def origin(self) -> int:
        """Position of the first slot of the first block."""
        return self.base * self.pool.tokens

    def hold(self) -> Hold:
        """References to all blocks as they are now."""
        hold = self._held() if self._held is not None else None
        if hold is None or (hold.base, hold.blocks) != (self.base, self.blocks):
            hold = Hold(self.pool, self.blocks, self.base)
            self._held = weakref.ref(hold)
        return hold

    def lacking(self, position: int, count: int) -> int:
        """Blocks that `count` tokens from `position` may take, a copy of a shared one included."""
        index, slot = divmod(position, self.pool.tokens)
        end = -(-(position + count) // self.pool.tokens) if count else index
        own = self.blocks[index - self.base :][:1] if count and slot else []
        copies = sum(self.pool.refs[block] > 1 for block in own)
        return max(0, end - self.base - len(self.blocks)) + copies

    def write(self, position: int, count: int) -> tuple[Ints, Ints]:
        """Blocks and slots for `count` tokens from `position`, the row's end: written by this row
        alone. A shared block goes on being shared by the first who writes behind what is in it."""
        blocks: list[int] = []
        slots: list[int] = []
        while count:
            index, slot = divmod(position, self.pool.tokens)
            fitting = min(count, self.pool.tokens - slot)
            block = self._writable(index - self.base, slot)
            self.pool.filled[block] = slot + fitting
            blocks += [block] * fitting
            slots += range(slot, slot + fitting)
            position, count = position + fitting, count - fitting
        return np.array(blocks, np.int64), np.array(slots, np.int64)

    def _writable(self, index: int, slot: int) -> int:
        pool = self.pool
        if index == len(self.blocks):
            self.blocks.append(pool.new())
            pool.low[self.blocks[index]] = slot
            return self.blocks[index]
        block = self.blocks[index]
        if pool.filled[block] == slot or pool.refs[block] == 1:
            return block
        self.replace(index, pool.copy(block, slot))
        return self.blocks[index]

    def replace(self, index: int, block: int) -> None:
        """Put a block that has been counted for this table in the place of another."""
        self.pool.drop([self.blocks[index]])
        self.blocks[index] = block

    def adopt(self, hold: Hold, first: int, stop: int) -> None:
        """Share the blocks of tokens [first, stop), which follow those that are here."""
        tokens = self.pool.tokens
        for index in range(first // tokens, -(-stop // tokens)):
            block = hold.blocks[index - hold.base]
            if index - self.base == len(self.blocks):
                self.pool.share([block])
                self.blocks.append(block)
            elif block != self.blocks[index - self.base]:
                self._merge(index, block, first % tokens, min(tokens, stop - index * tokens))

    def _merge(self, index: int, block: int, slot: int, stop: int) -> None:
        """Two states meet within a block: the later one has all of it, unless its row began there."""
        needed = max(0, self.start - index * self.pool.tokens)
        if self.pool.low[block] <= needed:
            self.pool.share([block])
            self.replace(index - self.base, block)
            return
        merged = self.pool.copy(self.blocks[index - self.base], slot)
        for plane in self.pool.planes.values():
            plane[merged][:, slot:stop] = plane[block][:, slot:stop]
        self.pool.filled[merged] = stop
        self.replace(index - self.base, merged)

    def forget(self, before: int) -> None:
        """Drop the blocks whose positions all lie before this one."""
        count = min(len(self.blocks), max(0, before // self.pool.tokens - self.base))
        self.pool.drop(self.blocks[:count])
        del self.blocks[:count]
        self.base += count
        self.start = max(self.start, self.origin)


@dataclass
class Joining:
    """A row to be: its table, and the spans that each layer has to write itself, because the state's
    arrays come from elsewhere: (first, stop, blocks, slots)."""

    table: Table
    foreign: list[tuple[int, int, Ints, Ints]] = field(default_factory=list)


@dataclass
class Placed:
    """Where the kept inputs of a round go: input `columns[i]` of row `rows[i]` into a slot."""

    rows: Ints
    columns: Ints
    blocks: Ints
    slots: Ints


@dataclass
class Plan:
    """What one forward reads: `blocks[b]` hold row b from `origins[b]` on, up to slot `stop`."""

    frame: Frame
    origins: tuple[int, ...]
    blocks: Ints  # (B, NB)
    stop: int
    earlier: Plan | None  # a launched round whose inputs are not in blocks yet
    begun: int  # the pool's number of it
    _indices: dict[int, mx.array] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Nothing is held yet."""
        return self.earlier is None and not any(self.frame.lengths)

    def index(self, heads: int) -> mx.array:
        """(B, H, NB) into a plane's (blocks * heads) first axis."""
        if heads not in self._indices:
            index = self.blocks[:, None] * heads + np.arange(heads)[:, None]
            self._indices[heads] = mx.array(index.astype(np.int32))
        return self._indices[heads]


def _end(frame: Frame, origins: tuple[int, ...]) -> int:
    """Slots that a forward's inputs reach to."""
    lengths = zip(frame.lengths, origins, strict=True)
    return max((n - origin for n, origin in lengths), default=0) + frame.width


class Book:
    """All rows' tables, and the rounds open on them."""

    def __init__(self, pool: Pool, window: int):
        self.pool, self.window = pool, window
        self.tables: list[Table] = []
        self.joining: list[Joining] = []  # while a change is being prepared
        self.open: list[Plan] = []
        self.placed: Placed

    def begin(self, frame: Frame) -> None:
        """Memory for all inputs is had before the forward; blocks are taken when they are kept."""
        tokens = self.pool.tokens
        spans = zip(self.tables, frame.lengths, frame.widths, strict=True)
        self.pool.reserve(sum(table.lacking(n, width) for table, n, width in spans))
        earlier = self.open[-1] if self.open else None
        origins = tuple(table.origin for table in self.tables)
        stop = _end(frame, origins)
        room = max(stop, _end(earlier.frame, origins) if earlier else 0)  # its padding included
        blocks = np.full((len(self.tables), -(-room // tokens)), BLANK, np.int64)
        for row, table in enumerate(self.tables):
            blocks[row, : len(table.blocks)] = table.blocks
        self.open.append(Plan(frame, origins, blocks, stop, earlier, self.pool.begin()))

    def abandon(self) -> None:
        self.pool.end(self.open.pop().begun)

    def kept(self, keep: Seq[int]) -> None:
        """The oldest round ends: say where its kept inputs go, and forget what windows have passed."""
        ended = self.open.pop(0)
        self.pool.end(ended.begun)
        lengths = ended.frame.lengths
        if self.open:
            self.open[0].earlier = None  # it has read what it needs
        self.pool.settle()
        spans = [t.write(n, k) for t, n, k in zip(self.tables, lengths, keep, strict=True)]
        self.placed = Placed(
            np.repeat(np.arange(len(keep)), keep),
            np.concatenate([np.arange(k) for k in keep]),
            np.concatenate([blocks for blocks, _ in spans]),
            np.concatenate([slots for _, slots in spans]),
        )
        if self.window:
            for table, n, k in zip(self.tables, lengths, keep, strict=True):
                table.forget(n + k - self.window + 1)

    def filter(self, keep: Seq[int]) -> None:
        stay = [self.tables[row] for row in keep]
        for row, table in enumerate(self.tables):
            if row not in keep:
                table.release()
        self.tables = stay
        self.pool.trim()

    def close(self) -> None:
        while self.open:
            self.abandon()
        self.filter([])

    def distinct(self) -> set[int]:
        return {block for table in self.tables for block in table.blocks}

    def check(self, lengths: Seq[int]) -> None:
        assert len(self.tables) == len(lengths), (len(self.tables), lengths)
        for table, length in zip(self.tables, lengths, strict=True):
            end = table.origin + len(table.blocks) * self.pool.tokens
            assert end - self.pool.tokens < max(length, 1) <= max(end, 1), (end, length)
            assert (
                table.start <= max(0, length - self.window + 1) if self.window else not table.start
            )
            self._check_filled(table, length)
        self.pool.check()

    def _check_filled(self, table: Table, length: int) -> None:
        for index, block in enumerate(table.blocks, table.base):
            first = index * self.pool.tokens
            low, stop = max(table.start, first) - first, min(self.pool.tokens, length - first)
            assert self.pool.low[block] <= low and stop <= self.pool.filled[block], (
                f"block {block} holds slots {self.pool.low[block]}.."
                f"{self.pool.filled[block]}, row has {low}..{stop} of it"
            )
