"""Lookup drafting: what followed the last time the text ran like this.

The idea is prompt lookup decoding (Saxena, 2023). Here the longest suffix of up to `max_ngram`
tokens that occurred before decides, at its latest occurrence, found in an index that grows by
O(max_ngram) a token. Rows need no weights and no saved state: they are refilled from token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from typing import Literal

from pipeline.errors import below, refuse
from pipeline.types import DraftRows, Target
from stages.drafters.history import HistoryRows

VOTERS = 32  # places of an n-gram that are remembered for a majority
Choice = Literal["latest", "first", "majority"]


class NGramRow:
    """One row's committed ids, and for each n-gram of them where its latest occurrence ended.

    `pending` is never indexed before it is committed: so the suffix that ends in it cannot find
    itself, and the index holds committed tokens only.
    """

    def __init__(self, min_ngram: int, max_ngram: int, growth: int, choice: Choice = "latest"):
        self._sizes = range(min_ngram, max_ngram + 1)
        self._growth, self._choice = growth, choice
        self.ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # the ends that count, the last wins

    def extend(self, tokens: Seq[int]) -> None:
        for token in tokens:
            self.ids.append(token)
            end = len(self.ids)
            for size in self._sizes:
                if size <= end:
                    self._note(tuple(self.ids[end - size :]), end)

    def _note(self, gram: tuple[int, ...], end: int) -> None:
        known = self._ends.setdefault(gram, [])
        if not known or self._choice == "majority":
            known.append(end)
            del known[:-VOTERS]
        elif self._choice == "latest":
            known[0] = end

    def propose(self, pending: int, depth: int) -> list[int]:
        text = [*self.ids[-self._sizes[-1] :], pending]
        for size in reversed(self._sizes):
            ends = self._ends.get(tuple(text[-size:])) if size <= len(text) else None
            if ends:
                length = min(depth, self._growth * self._agreement(pending, ends[-1], depth))
                if self._choice == "majority":
                    return self._voted(ends, pending, length)
                return [*self.ids[ends[-1] : ends[-1] + length], pending][:length]
        return []

    def _voted(self, ends: list[int], pending: int, length: int) -> list[int]:
        """Token by token what most of the places say, the latest of equals; those who said otherwise
        vote no more. Ends where fewer than half of the voters agree, or the text does."""
        found: list[int] = []
        while len(found) < length:
            said = [(end, self._at(end + len(found), pending)) for end in reversed(ends)]
            votes = Counter(token for _, token in said if token is not None)
            if not votes or 2 * votes.most_common(1)[0][1] < len(ends):
                break
            found.append(votes.most_common(1)[0][0])
            ends = [end for end, token in reversed(said) if token == found[-1]]
        return found

    def _at(self, index: int, pending: int) -> int | None:
        """Token at `index` of the text that `pending` ends."""
        if index < len(self.ids):
            return self.ids[index]
        return pending if index == len(self.ids) else None

    def _agreement(self, pending: int, end: int, enough: int) -> int:
        """How many tokens before `end` equal those at the end of the text, counted to `enough`."""
        length = 1  # pending itself
        last = len(self.ids)
        while length < min(enough, end) and self.ids[end - 1 - length] == self.ids[last - length]:
            length += 1
        return length

    def check_integrity(self) -> None:
        """The index equals one built afresh."""
        fresh = NGramRow(self._sizes[0], self._sizes[-1], self._growth, self._choice)
        fresh.extend(self.ids)
        assert fresh._ends == self._ends, "n-gram index differs from its own ids"


class NGram:
    """Copies what followed the latest occurrence of the longest suffix seen before.

    A wide verify pass costs 1.5 to 3 narrow ones, so drafting has to be right more often than not:
    suffixes shorter than `min_ngram` are no evidence, and a proposal is at most `growth` times as
    long as the agreement before it, looked at beyond `max_ngram`. So a copy doubles its proposals
    every round until they reach the depth, and a chance repetition costs a short one. Replayed
    under three laws of cost by width, 3, 5 and 1 gave at least 0.95 of plain decoding on text that
    copies nothing, 1.05 to 2.2 on copies with one token in 3 to 12 changed, 4 to 7 on clean ones.
    `growth=0` is no bound.

    `choice`: of several places the `latest`; the `first`, as in prompt lookup of transformers and vLLM;
    or the `majority` of up to 32, token by token, as long as half of them agree.
    """

    can = frozenset({"refill", "external", "adapters"})
    prefill = "tail"
    taps: tuple[int, ...] = ()

    def __init__(
        self, *, max_ngram: int = 5, min_ngram: int = 3, growth: int = 1, choice: Choice = "latest"
    ):
        refuse(
            min_ngram=below(min_ngram, 1)
            or (f"{min_ngram} is above {max_ngram=}." if min_ngram > max_ngram else ""),
            growth="" if growth >= 0 else f"{growth} is negative; 0 means no bound.",
        )
        self._min, self._max, self._growth, self._choice = min_ngram, max_ngram, growth, choice
        self.namespace = f"ngram:{max_ngram}:{min_ngram}:{growth}:{choice}"

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        growth = self._growth or max_width
        return HistoryRows(lambda: NGramRow(self._min, self._max, growth, self._choice))
