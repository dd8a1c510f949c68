"""Proposals from a hat: they are wrong all the time, so every round is as wide as it can be and rolls back.

For lossless tests (a drafter that is right hides rollback faults) and for measuring a wide round.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.types import DraftRows, Target
from stages.drafters.history import HistoryRows

WORD = (1 << 64) - 1


def mixed(number: int) -> int:
    """The 64-bit finalizer of splitmix64 (Steele, Lea, Flood, 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & WORD
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & WORD
    return number ^ number >> 31


class RandomRow:
    """One row, of which only the length matters."""

    def __init__(self, seed: int, vocab_size: int):
        self._seed, self._vocab_size = seed, vocab_size
        self.length = 0

    def extend(self, tokens: Seq[int]) -> None:
        self.length += len(tokens)

    def propose(self, pending: int, depth: int) -> list[int]:
        first = self.length + 1  # the absolute position after pending
        return [mixed(self._seed ^ mixed(first + i)) % self._vocab_size for i in range(depth)]

    def check_integrity(self) -> None:
        assert self.length >= 0


class RandomDrafter:
    """Always as many tokens as it may, each a pure function of (seed, absolute position)."""

    can = frozenset({"refill", "external", "adapters"})
    prefill = "tail"
    taps: tuple[int, ...] = ()

    def __init__(self, *, seed: int = 0):
        self._seed = seed
        self.namespace = f"random:{seed}"

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        return HistoryRows(lambda: RandomRow(self._seed, target.vocab_size))
