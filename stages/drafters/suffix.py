"""Lookup drafting by the longest suffix that has occurred before, whatever its length.

The idea is that of suffix decoding (Oliaro et al., SuffixDecoding, 2024; Hu et al., SAM decoding,
2025): the longer the agreement, the longer the proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from pipeline.errors import below, refuse
from pipeline.types import DraftRows, Owner, Target
from stages.drafters.history import HistoryRows
from stages.drafters.suffix_memory import CONTEXT, Memories, Memory, Recall
from stages.drafters.suffix_tree import SuffixTree

LEAST = 256  # tokens: less would forget an answer before it helps


class SuffixRow:
    """One row's committed ids in a suffix tree. `pending` is looked up, never put in."""

    def __init__(self, min_match: int, growth: float):
        self._min, self._growth = min_match, growth
        self.tree = SuffixTree()
        self._recall: Recall | None = None

    def extend(self, tokens: Seq[int]) -> None:
        self.tree.extend(tokens)

    def remember(self, memory: Memory) -> None:
        """What earlier answers said is looked through too."""
        if self._recall is None or self._recall.memory is not memory:
            self._recall = Recall(memory)

    def propose(self, pending: int, depth: int) -> list[int]:
        tree, place = self.tree, self.tree.advance(self.tree.end, pending, self._min)
        if self._recall is not None:
            said, there = self._recall.longest(tree.text, pending, self._min)
            if there.length > min(place.length, CONTEXT):
                tree, place = said, there
        if not place.length:
            return []
        length = min(depth, max(1, int(self._growth * place.length)))
        return tree.following(place, pending, length)

    def check_integrity(self) -> None:
        """The tree equals one built afresh."""
        fresh = SuffixTree()
        fresh.extend(self.tree.text)
        assert fresh.same_as(self.tree), "the suffix tree differs from that of its own ids"


class RememberingRows(HistoryRows[SuffixRow]):
    """Rows that know the earlier answers of their own memory, and of no other."""

    def __init__(self, make: Callable[[], SuffixRow], memories: Memories):
        super().__init__(make)
        self._memories = memories

    def assign(self, owners: Seq[Owner]) -> None:
        for row, owner in zip(self._rows, owners, strict=True):
            row.remember(self._memories.of(owner.memory))


class Suffix:
    """Copies what followed the longest suffix of the text seen before, at its latest occurrence.

    Unlike `ngram` it has no longest context: among several places that read alike it finds the one
    that agrees furthest back, and it knows how far, so that `growth` bounds a proposal by real evidence.

    `remember` > 0 tokens: answers that ended are kept, by namespace, and where one of them agrees
    longer than the row's own text, its most frequent continuation is proposed.
    """

    can = frozenset({"refill", "external", "adapters"})
    prefill = "tail"
    taps: tuple[int, ...] = ()

    def __init__(self, *, min_match: int = 3, growth: float = 1.0, remember: int = 0):
        bounded, little = 0 < growth < float("inf"), remember and remember < LEAST
        refuse(
            min_match=below(min_match, 1, "tokens"),
            growth="" if bounded else f"wants a number > 0, got {growth}",
            remember=f"wants 0 (nothing) or >= {LEAST} tokens, got {remember}" if little else "",
        )
        self._min, self._growth, self._remember = min_match, growth, remember
        self._memories = Memories(remember)
        self.namespace = f"suffix:{min_match}:{growth}:{remember}"

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._memories.forget()

    def learn(self, namespace: str, ids: Seq[int]) -> None:
        """An answer that has ended."""
        if self._remember:
            self._memories.of(namespace).learn(ids)

    def rows(self, target: Target, max_width: int) -> DraftRows:
        def make() -> SuffixRow:
            return SuffixRow(self._min, self._growth)

        return RememberingRows(make, self._memories) if self._remember else HistoryRows(make)
