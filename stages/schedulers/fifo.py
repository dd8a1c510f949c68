"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.errors import below, refuse
from pipeline.types import Sequence


class Fifo:
    """Starts requests in the order in which they arrived, which is the order of the queue.

    `step_tokens`: tokens of one step while rows decode; ValueError if there is no room in it.
    """

    can = frozenset[str]()

    def __init__(self, *, step_tokens: int | None = 256) -> None:
        refuse(step_tokens=below(step_tokens, 1, "tokens"))
        self.step_tokens = step_tokens

    def open(self) -> None: ...

    def close(self) -> None: ...

    def order(self, waiting: Seq[Sequence], active: Seq[Sequence]) -> list[Sequence]:
        return list(waiting)

    def started(self, sequence: Sequence) -> None: ...

    def finished(self, sequence: Sequence) -> None: ...
