"""Rows whose attention layers, full or sliding, lie in blocks that rows and saved states share.

A forward reads each row's blocks in the order of positions into one array, adds its own inputs and
attends that: the same numbers in the same order as in a plain buffer, wherever the blocks lie and
whoever shares them. Only what a round keeps is written to blocks, so there is nothing to roll back.
Layers of other kinds have their usual layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.types import Change, LayerSpec, State
from stages.rows.attention import AttentionLayout
from stages.rows.blocks import Key, Pages, Pool, words
from stages.rows.frame import Frame
from stages.rows.layouts import LAYOUTS
from stages.rows.rows import LayeredRows
from stages.rows.state import layer_range, pieces, plain, since
from stages.rows.tables import Book, Joining, Plan, Table


class PagedLayout:
    """One layer's cache object. The first layer of a book (`leads`) keeps it for all of them.

    `coder` says what is stored of keys and values and how that is attended; its buffers stay empty.
    """

    coded_from = 0

    def __init__(self, index: int, coder: AttentionLayout, book: Book, leads: bool):
        self.index, self.coder, self.book, self.leads = index, coder, book, leads
        self._frame = Frame((), 0)
        self._new: list[tuple[mx.array, ...]] = []  # inputs of each open round, as they are stored
        self._types: list[mx.Dtype] = []  # of these, before they were made words
        self._launched = 0  # rounds

    # --- what the model calls

    @property
    def offset(self) -> int | mx.array:
        return self._frame.offset

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        plan = self.book.open[-1]
        return self._frame.least_mask(
            plan.origins, 0, plan.stop, self.book.window or window_size or 0, return_array
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Keys and values (B, H, T, D) from each row's first block on, its inputs included."""
        plan = self.book.open[-1]
        encoded = self.coder.encode(keys, values)
        self._new[-1] = tuple(map(words, encoded))
        self._types = [array.dtype for array in encoded]
        if plan.empty:
            return self.coder.fetched(encoded)
        stored = [
            self._read(plan, name, at).view(array.dtype)
            for at, (name, array) in enumerate(zip(self.coder.names, encoded, strict=True))
        ]
        return self.coder.fetched(tuple(stored))

    def _read(self, plan: Plan, name: str, at: int) -> mx.array:
        rows, heads, _, size = self._new[-1][at].shape
        plane = self.book.pool.planes.get((self.index, name))
        if plane is None:  # a round ahead of the very first
            shape = (rows, heads, plan.blocks.shape[1] * self.book.pool.tokens, size)
            cells = mx.zeros(shape, self._new[-1][at].dtype)
        else:
            cells = mx.take(plane.array, plan.index(heads), axis=0).reshape(rows, heads, -1, size)
        if plan.earlier is not None:
            cells = _put(cells, self._new[-2][at], plan.earlier.frame, plan.origins)
        cells = _put(cells, self._new[-1][at], plan.frame, plan.origins)
        return cells[:, :, : plan.stop]

    # --- rounds

    def begin(self, frame: Frame) -> None:
        if self.leads:
            self.book.begin(frame)
        self._frame = frame
        self._new.append(())

    def launched(self) -> None:
        self._launched += 1

    def abandon(self) -> None:
        if self.leads:
            self.book.abandon()
        self._new.pop()

    def kept(self, keep: Seq[int]) -> None:
        if self.leads:
            self.book.kept(keep)
        placed, new = self.book.placed, self._new.pop(0)
        self._launched -= 1
        if not len(placed.rows):
            return
        for name, array, dtype in zip(self.coder.names, new, self._types, strict=True):
            inputs = np.asarray(array).swapaxes(1, 2)[placed.rows, placed.columns]
            plane = self.book.pool.plane((self.index, name), array, dtype)
            plane[:][placed.blocks, :, placed.slots] = inputs

    # --- membership

    @property
    def starts(self) -> list[int]:
        return [table.start for table in self.book.tables]

    def install(self, built: list[Joining]) -> None:
        if self.leads:
            self.book.tables += [joining.table for joining in built]

    def filter(self, keep: Seq[int], lengths: Seq[int]) -> None:
        if self.leads:
            self.book.filter(keep)

    def reusable_from(self, row: int, length: int) -> int:
        return 0

    def first(self, row: int, length: int) -> int:
        return self.starts[row]

    def held(self, row: int, first: int, stop: int) -> dict[str, Any]:
        """Tokens [first, stop) by name, without a copy."""
        hold = self.book.tables[row].hold()
        return {name: Pages(hold, key, first, stop) for name, key in self._keys().items()}

    def write(self, blocks: Any, slots: Any, arrays: Mapping[str, mx.array]) -> None:
        """Put arrays (H, tokens, size) of a state from elsewhere into blocks of a table that is being built."""
        for name, key in self._keys().items():
            array = words(arrays[name])[None]
            plane = self.book.pool.plane(key, array, arrays[name].dtype)
            plane[:][blocks, :, slots] = np.asarray(array)[0].swapaxes(0, 1)

    def arrays(self) -> list[mx.array]:
        """What is computed and not in blocks yet."""
        return [array for new in self._new[: self._launched] for array in new]

    def check(self, lengths: Seq[int]) -> None:
        assert len(self._new) == len(self.book.open), (len(self._new), len(self.book.open))
        if self.leads:
            self.book.check(lengths)

    def _keys(self) -> dict[str, Key]:
        return {name: (self.index, name) for name in self.coder.names}


class PagedRows(LayeredRows):
    """`LayeredRows` that knows how states and tables share blocks."""

    def __init__(self, layouts: Seq[Any], specs: Seq[LayerSpec], max_width: int):
        super().__init__(layouts, specs, max_width)
        self._leaders = [one for one in layouts if isinstance(one, PagedLayout) and one.leads]

    def _build(self, index: int, states: Seq[State | None], lengths: Seq[int]) -> Any:
        layout = self.layouts[index]
        if not isinstance(layout, PagedLayout):
            return super()._build(index, states, lengths)
        if layout.leads:
            pairs = zip(states, lengths, strict=True)
            layout.book.joining = [self._join(index, layout.book, *pair) for pair in pairs]
        for joining, state in zip(layout.book.joining, states, strict=True):
            for first, stop, blocks, slots in joining.foreign:
                assert state is not None
                arrays = layer_range(state, index, first, stop)
                layout.write(blocks, slots, {name: plain(arrays[name]) for name in arrays})
        return layout.book.joining

    def _join(self, index: int, book: Book, state: State | None, length: int) -> Joining:
        """A table that shares the state's blocks where they are of this pool."""
        first = since(self.specs[index], length)
        joining, reached = Joining(Table(book.pool, first)), length
        parts = []
        for low, high, piece in pieces(state.segments, index, length) if state else ():
            if reached <= first:
                break
            reached = max(low, first)
            parts.append((reached, high, next(iter(piece.arrays.values()))))
        assert reached <= first, f"layer {index} lacks tokens [{first}, {reached})"
        for low, high, array in reversed(parts):
            if isinstance(array, Pages) and array.hold.pool is book.pool:
                joining.table.adopt(array.hold, low, high)
            else:
                joining.foreign.append((low, high, *joining.table.write(low, high - low)))
        return joining

    def prepare_append(self, states: Seq[State | None]) -> Change:
        try:
            return super().prepare_append(states)
        finally:
            for layout in self._leaders:
                layout.book.joining = []

    def nbytes(self) -> int:
        """Blocks that several rows share count once."""
        others = [
            a for one in self.layouts if not isinstance(one, PagedLayout) for a in one.arrays()
        ]
        blocks = sum(len(one.book.distinct()) * one.book.pool.block_bytes for one in self._leaders)
        return blocks + sum(array.nbytes for array in others)

    def close(self) -> None:
        for layout in self._leaders:
            layout.book.close()
        self._leaders = []
        super().close()


def _put(cells: mx.array, new: mx.array, frame: Frame, origins: tuple[int, ...]) -> mx.array:
    """Write a forward's inputs (B, H, W, S) behind what each row holds. In place: nobody else has `cells`."""
    ends = {n - o for n, o in zip(frame.lengths, origins, strict=True)}
    if len(ends) == 1:
        at = ends.pop()
        cells[:, :, at : at + frame.width] = new
        return cells
    slots = mx.broadcast_to(frame.slots(origins), new.shape)
    return mx.put_along_axis(cells, slots, new, axis=2)


def paged_rows(
    specs: Seq[LayerSpec],
    max_width: int,
    pools: Mapping[int, Pool],
    coder: Callable[[LayerSpec, int], AttentionLayout],
) -> PagedRows:
    """Empty rows: layers with the same window lie in the same blocks (`pools`, by window)."""
    books: dict[int, Book] = {}
    layouts: list[Any] = []
    for index, spec in enumerate(specs):
        if not spec.codable:
            layouts.append(LAYOUTS[spec.kind](spec, max_width))
            continue
        leads = spec.window not in books
        book = books.setdefault(spec.window, Book(pools[spec.window], spec.window))
        layouts.append(PagedLayout(index, coder(spec, max_width), book, leads))
    return PagedRows(layouts, specs, max_width)
