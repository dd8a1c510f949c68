"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.types import Sequence


class Fifo:
    """Starts requests in the order in which they arrived, which is the order of the queue."""

    can = frozenset[str]()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def order(self, waiting: Seq[Sequence], active: Seq[Sequence]) -> list[Sequence]:
        return list(waiting)
