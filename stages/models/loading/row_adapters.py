"""What each row of a pass wears, told to the linear layers while the pass is built.

A model's code knows no adapters, and what it is given has no place for them. So who builds a pass says
beside it whose rows they are; layers that have something to add ask for it. Recurrent layers are run
again later (`mixers`), for all rows or for one, and then with what the rows wore the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from pipeline.types import Worn


class Places(NamedTuple):
    """Where the rows of a pass find their part of a stack."""

    slots_B: mx.array  # uint32; any for a row that has no part in it
    mask_B11: mx.array | None  # rows that have; None: all


class RowAdapters:
    """Of the pass that is being built; nobody wears anything outside of `worn`."""

    def __init__(self) -> None:
        self.rows: tuple[Worn, ...] = ()  # empty: nobody wears anything
        self._places: dict[Any, Places | None] = {}

    @contextmanager
    def worn(self, rows: Sequence[Worn]) -> Iterator[None]:
        """Build passes over these rows; undone at the end, whatever happens."""
        before = self.rows
        self.rows, self._places = tuple(rows) if any(rows) else (), {}
        try:
            yield
        finally:
            self.rows, self._places = before, {}

    @property
    def turns(self) -> int:
        """The most that a row wears."""
        return max(map(len, self.rows), default=0)

    def places(self, stack: Worn, turn: int) -> Places | None:
        """For the `turn`-th of what each row wears, its slot in a stack of these digests; None if no
        row has one. All layers whose stacks are alike share the answer."""
        key = stack, turn
        if key not in self._places:
            self._places[key] = self._found(stack, turn)
        return self._places[key]

    def _found(self, stack: Worn, turn: int) -> Places | None:
        wanted = [row[turn] if turn < len(row) else "" for row in self.rows]
        has = [digest in stack for digest in wanted]
        if not any(has):
            return None
        slots = [stack.index(d) if found else 0 for d, found in zip(wanted, has, strict=True)]
        mask = None if all(has) else mx.array(has)[:, None, None]
        return Places(mx.array(slots, mx.uint32), mask)
