"""The same depth every round."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.errors import refuse
from pipeline.types import Batch, Sequence


def room(sequence: Sequence, most: int) -> int:
    """How long a draft of the row may be, up to `most`: of r tokens left at most r - 1 can be drafts
    that matter, because each round also emits one token of the target's own. `max_new` is clamped to
    the context, so no draft lies beyond it."""
    left = sequence.max_new - len(sequence.output_ids) - 1
    return max(0, min(most, left)) if sequence.live else 0


class Fixed:
    """Always `max`, except near the end of a row's budget. 0 switches speculation off."""

    can: frozenset[str] = frozenset()

    def __init__(self, *, max: int = 8):
        refuse(max="" if max >= 0 else f"{max} is negative; 0 means no drafts.")
        self.max = max

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def choose(self, batch: Batch) -> list[int]:
        return [room(sequence, self.max) for sequence in batch.sequences]

    def cut(self, batch: Batch, proposals: Seq[Seq[int]]) -> list[int]:
        return [len(proposal) for proposal in proposals]

    def observe(self, batch: Batch, seconds: float) -> None:
        """A fixed depth learns nothing."""
