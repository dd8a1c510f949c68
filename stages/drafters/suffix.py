"""Lookup drafting by the longest suffix that has occurred before, whatever its length.

The idea is that of suffix decoding (Oliaro et al., SuffixDecoding, 2024; Hu et al., SAM decoding,
2025): the longer the agreement, the longer the proposal.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.types import DraftRows, Target
from stages.drafters.history import HistoryRows
from stages.drafters.suffix_tree import SuffixTree


class SuffixRow:
    """One row's committed ids in a suffix tree. `pending` is looked up, never put in."""

    def __init__(self, min_match: int, growth: float):
        self._min, self._growth = min_match, growth
        self.tree = SuffixTree()

    def extend(self, tokens: Seq[int]) -> None:
        self.tree.extend(tokens)

    def propose(self, pending: int, depth: int) -> list[int]:
        place = self.tree.advance(self.tree.end, pending, self._min)
        if not place.length:
            return []
        length = min(depth, max(1, int(self._growth * place.length)))
        return self.tree.following(place, pending, length)

    def check_integrity(self) -> None:
        """The tree equals one built afresh."""
        fresh = SuffixTree()
        fresh.extend(self.tree.text)
        assert fresh.same_as(self.tree), "the suffix tree differs from that of its own ids"


class Suffix:
    """Copies what followed the longest suffix of the text seen before, at its latest occurrence.

    Unlike `ngram` it has no longest context: among several places that read alike it finds the one
    that agrees furthest back, and it knows how far, so that `growth` bounds a proposal by real evidence.
    """

    can = frozenset({"refill", "external"})
    prefill = "tail"
    taps: tuple[int, ...] = ()

    def __init__(self, *, min_match: int = 3, growth: float = 1.0):
        if min_match < 1:
            raise ValueError(f"min_match: wants >= 1 tokens, got {min_match}")
        if not 0 < growth < float("inf"):
            raise ValueError(f"growth: wants a number > 0, got {growth}")
        self._min, self._growth = min_match, growth
        self.namespace = f"suffix:{min_match}:{growth}"

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        return HistoryRows(lambda: SuffixRow(self._min, self._growth))
