"""The null drafter: every round is an ordinary decode step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.types import DraftRows, Target
from stages.drafters.history import HistoryRows


class NoRow:
    """A row that remembers nothing."""

    def extend(self, tokens: Seq[int]) -> None:
        pass

    def propose(self, pending: int, depth: int) -> list[int]:
        return []

    def check_integrity(self) -> None:
        pass


class NoDrafter:
    """Proposes nothing and keeps nothing, so that no loop asks whether there is a drafter."""

    can = frozenset({"refill", "external", "adapters"})
    prefill = "tail"
    namespace = "none"
    taps: tuple[int, ...] = ()

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        return HistoryRows(NoRow)
