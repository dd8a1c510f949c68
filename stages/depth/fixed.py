"""The same depth every round."""

from __future__ import annotations

from pipeline.errors import ConfigError, Problem
from pipeline.types import Batch, Sequence


class Fixed:
    """Always `max`, except near the end of a row's budget: of r tokens left at most r - 1 can be
    drafts that matter, because each round also emits one token of the target's own. `max_new` is
    clamped to the context, so no draft lies beyond it. 0 switches speculation off."""

    can: frozenset[str] = frozenset()

    def __init__(self, *, max: int = 8):
        if max < 0:
            raise ConfigError([Problem("depth.max", f"{max} is negative; 0 means no drafts.")])
        self.max = max

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def choose(self, batch: Batch) -> list[int]:
        return [self._room(sequence) for sequence in batch.sequences]

    def _room(self, sequence: Sequence) -> int:
        left = sequence.max_new - len(sequence.output_ids) - 1
        return max(0, min(self.max, left)) if sequence.live else 0

    def observe(self, batch: Batch, seconds: float) -> None:
        """A fixed depth learns nothing."""
