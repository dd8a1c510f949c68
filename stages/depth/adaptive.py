"""The depth that makes most tokens a second, learned while serving."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pipeline.errors import below, refuse
from pipeline.types import Batch, Sequence
from stages.depth.evidence import SLOPE, Costs, Odds, Plain, RowNotes, Worth
from stages.depth.fixed import room

POOL_FADE = 0.99  # what all rows have shown fades slowly
PATIENCE = 128  # most rounds that a row waits before it tries again
EVEN = 0.02  # rates that differ by less are alike: the longest of them is taken
FREE = 0.02  # a drafter that takes less of a plain round than this is always asked


class _Row:
    """What is known of one row, and how long it has been left without drafts."""

    def __init__(self, odds: Odds, patience: int):
        self.odds, self.patience = odds, patience
        self.refused = 0
        self._unseen: list[int] = []  # what is left of a proposal that was refused
        self._fresh = True  # nothing of it has come true yet

    def refuse(self, proposal: Seq[int]) -> None:
        """Nothing of it is verified; the tokens that come will tell."""
        if not self._unseen:
            self._unseen, self._fresh = list(proposal), True

    def compare(self, tokens: Iterable[int]) -> None:
        """What came instead of a refused proposal says how right it was, free of charge."""
        for token in tokens:
            if not self._unseen:
                return
            right = self._unseen.pop(0) == token
            self.odds.judge(int(not self._fresh), int(right), 1)
            self._fresh = False
            if not right:
                self._unseen = []

    def verified(self) -> None:
        self._unseen = []


class Adaptive:
    """Up to `max` drafts, as many as promise most tokens a second: what the row's own rounds say of how
    often drafts are right, against the measured seconds of each width at this number of rows.

    A wide round is also charged what it takes from a plain one after it, and what rounds brought is
    held against what they promised. Where none pays by `margin`, none is verified, and after `probe`
    such rounds a short proposal is tried again; each failure doubles the wait, up to 128. A drafter
    that costs next to nothing is asked in every round and its proposals are cut; those that are
    refused are compared with what came instead, so that a row which begins to repeat something is
    noticed at once, and one is tried, for what it costs, after 128. One that costs more is not asked
    while it does not pay. Knows nothing about drafters and
    models.
    """

    can: frozenset[str] = frozenset()

    def __init__(self, *, max: int = 16, margin: float = 0.2, probe: int = 16):
        refuse(max=below(max, 0), margin=below(margin, 0), probe=below(probe, 1))
        self.max, self._margin, self._probe = max, margin, probe
        self.open()

    def open(self) -> None:
        self._pooled, self._costs, self._rows = Odds(), Costs(), RowNotes()
        self._drafting = Costs()  # by (rows, 1 + depth)
        self._plain, self._worth = Plain(), Worth()
        self._wide, self._promised = False, 0.0  # the last round; what this one has promised
        self._asked, self._decided, self._began, self._spent = 0, False, 0.0, 0.0

    def close(self) -> None:
        pass

    def choose(self, batch: Batch) -> list[int]:
        rooms = [room(sequence, self.max) for sequence in batch.sequences]
        self._asked, self._spent, self._promised = max(rooms, default=0), 0.0, 0.0
        self._decided = bool(self._asked) and not self._free(len(rooms))
        if self._decided:
            self._asked = self._best(batch.sequences, rooms, drafting=True)
        self._began = time.perf_counter()
        return [min(depth, self._asked) for depth in rooms]

    def cut(self, batch: Batch, proposals: Seq[Seq[int]]) -> list[int]:
        self._spent = time.perf_counter() - self._began
        self._drafting.note(len(proposals), 1 + self._asked, self._spent)
        lengths = [len(proposal) for proposal in proposals]
        if self._decided:
            return lengths  # before they were made
        width = self._best(batch.sequences, lengths, drafting=False) if any(lengths) else 0
        if not width:
            for sequence, proposal in zip(batch.sequences, proposals, strict=True):
                self._of(sequence).refuse(proposal)
        return [min(length, width) for length in lengths]

    def observe(self, batch: Batch, seconds: float) -> None:
        rows = batch.sequences
        self._compare(rows, seconds)
        width = 1 + max((len(s.proposal) for s in rows), default=0)
        self._costs.note(len(rows), width, seconds - self._spent)
        if width == 1:
            self._plain.note(len(rows), seconds - self._spent, after_wide=self._wide)
        self._wide, self._spent = width > 1, 0.0
        for sequence in rows:
            if sequence.finish_reason is None:
                if sequence.proposal:
                    self._judge(self._of(sequence), len(sequence.proposal), sequence.accepted)
                else:
                    self._of(sequence).compare(token.token_id for token in sequence.emitted)

    def _compare(self, rows: Seq[Sequence], seconds: float) -> None:
        """What a wide round brought with what it promised."""
        if self._promised:
            plain = self._plain.usual(len(rows), self._costs.of(len(rows), 1, seconds))
            tokens = sum(len(sequence.emitted) for sequence in rows) / len(rows)
            had = tokens * plain / (seconds + self._plain.lost(len(rows)) * plain)
            self._worth.note(self._promised, had)

    def _judge(self, row: _Row, verified: int, accepted: int) -> None:
        row.verified()
        row.odds.note(verified, accepted)
        self._pooled.note(verified, accepted, POOL_FADE)
        if accepted == verified:
            row.patience = self._probe

    def _of(self, sequence: Sequence) -> _Row:
        found: _Row = self._rows.get(sequence, _Row(Odds(self._pooled), self._probe))
        return found

    def _free(self, rows: int) -> bool:
        """Whether asking the drafter costs so little that its proposals may be seen first."""
        spent, plain = self._drafting.of(rows, 1 + self._asked), self._costs.of(rows, 1, 1.0)
        return spent < FREE * plain

    def _best(self, sequences: Seq[Sequence], lengths: Seq[int], *, drafting: bool) -> int:
        """The length to cut at, of what each row could have: where tokens a second are most, or where
        a row has waited long enough for another try; else 0."""
        rows = [self._of(sequence) for sequence in sequences]
        most = max(lengths)
        tokens = [0.0] * (most + 1)
        for row, length in zip(rows, lengths, strict=True):
            gains = list(row.odds.expected(length))
            for width in range(most + 1):
                tokens[width] += gains[min(width, length)]
        rates = [tokens[w] / self._seconds(len(rows), w, drafting) for w in range(most + 1)]
        best = max(rates)
        width = max(w for w in range(most + 1) if rates[w] >= best * (1 - EVEN))
        if best * self._worth.share <= rates[0] * (1 + self._margin):
            self._worth.refused()
            asking = [row for row, length in zip(rows, lengths, strict=True) if length]
            width = min(most, self._try_again(asking, drafting))
        self._promised = rates[width] / rates[0] if width else 0.0
        return width

    def _seconds(self, rows: int, depth: int, drafting: bool) -> float:
        """Of a round, and of what it takes from a plain one after it; a plain one pays for the last."""
        seconds = self._costs.of(rows, 1 + depth, 1.0 + SLOPE * depth)
        if depth or self._wide:
            seconds += self._plain.lost(rows) * self._costs.of(rows, 1, 1.0)
        return seconds + (self._drafting.of(rows, 1 + depth) if drafting and depth else 0.0)

    def _try_again(self, rows: Seq[_Row], drafting: bool) -> int:
        """2 if a row that has been refused long enough is due, else 0; and counts the refusal. Where
        proposals are seen, what came instead has judged them: only costs are learned by a try."""
        due = False
        for row in rows:
            row.refused += 1
            if row.refused >= (row.patience if drafting else PATIENCE):
                row.refused, row.patience = 0, min(2 * row.patience, PATIENCE)
                due = True
        return 2 if due else 0
