"""Drafters for tests: they know the answer, and may spoil it. `book` is set after opening."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.types import DraftRows, Target
from stages.drafters.history import HistoryRows


class Oracle:
    """Proposes the rest of the sequence in `book` that the row follows.

    `wrong_every` n > 0 spoils every proposal at absolute positions divisible by n (1: always wrong);
    `fail_every` m > 0 raises at every m-th call of draft, `lose_every` k > 0 at every k-th token
    taken in, `deny_every` j > 0 at every j-th making of rows.
    """

    can = frozenset({"refill", "external", "adapters"})
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        wrong_every: int = 0,
        fail_every: int = 0,
        lose_every: int = 0,
        deny_every: int = 0,
        prefill: str = "tail",
    ):
        self.wrong_every, self.fail_every, self.prefill = wrong_every, fail_every, prefill
        self.lose_every, self.taken = lose_every, 0
        self.deny_every, self.made = deny_every, 0
        self.namespace = f"oracle:{wrong_every}"
        self.book: list[list[int]] = []
        self.calls = 0

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        self.made += 1
        if self.deny_every and self.made % self.deny_every == 0:
            raise RuntimeError("a drafter's own fault, before the first round")
        return HistoryRows(lambda: _OracleRow(self, target.vocab_size))


class _OracleRow:
    def __init__(self, oracle: Oracle, vocab_size: int):
        self.oracle, self.vocab_size = oracle, vocab_size
        self.ids: list[int] = []

    def extend(self, tokens: Seq[int]) -> None:
        for token in tokens:
            self.oracle.taken += 1
            if self.oracle.lose_every and self.oracle.taken % self.oracle.lose_every == 0:
                raise RuntimeError("a drafter's own fault, after the round")
            self.ids.append(token)

    def propose(self, pending: int, depth: int) -> list[int]:
        self.oracle.calls += 1
        if self.oracle.fail_every and self.oracle.calls % self.oracle.fail_every == 0:
            raise RuntimeError("a drafter's own fault")
        known = [*self.ids, pending]
        for answer in self.oracle.book:
            if answer[: len(known)] == known:
                start = len(known)
                return [
                    self._spoil(t, start + i) for i, t in enumerate(answer[start : start + depth])
                ]
        return [0] * depth

    def _spoil(self, token: int, position: int) -> int:
        every = self.oracle.wrong_every
        return (token + 1) % self.vocab_size if every and position % every == 0 else token

    def check_integrity(self) -> None:
        pass
