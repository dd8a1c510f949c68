"""What a drafter's faults cost: the speculation of the rows they concern, for a while."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support import ORACLE, prompt_ids, serving

from pipeline.drafting import book_faults
from pipeline.trace import Telemetry, Totals
from pipeline.types import Attachment, Batch, GuardedRows, Proposal, Request, Sequence
from pipeline.types.trust import FORGIVEN, Trust
from stages.drafters.history import HistoryRows

BAD = 13  # a row that begins with it is the culprit
VOCAB = 100


class Row:
    def __init__(self):
        self.ids = []

    def extend(self, tokens):
        self.ids += tokens

    def propose(self, pending, depth):
        return [len(self.ids)] * depth

    def check_integrity(self):
        pass


class Frail(HistoryRows):
    """Fails in `where` as soon as `culprit(row's ids)` is asked or fed."""

    def __init__(self, said):
        super().__init__(Row)
        self.said = said
        said.made += 1
        if said.where == "make":
            raise RuntimeError("cannot be made")

    def _look(self, where, concerned):
        rows = zip(self._rows, concerned, strict=True)
        if self.said.where == where and any(c and self.said.culprit(r.ids) for r, c in rows):
            raise RuntimeError("a drafter's own fault")

    def draft(self, pending, depths, samplers):
        self.said.calls += 1
        self._look("draft", depths)
        return super().draft(pending, depths, samplers)

    def commit(self, inputs, hidden=None):
        self._look("commit", inputs)
        super().commit(inputs)

    def prepare_append(self, tokens, attachments):
        if self.said.where == "append" and any(map(self.said.culprit, tokens)):
            raise RuntimeError("a row it cannot take")
        return super().prepare_append(tokens, attachments)


class Side:
    """Guarded rows and the sequences they belong to, round by round."""

    def __init__(self, where, *firsts, culprit=lambda ids: ids[:1] == [BAD]):
        self.said = SimpleNamespace(where=where, culprit=culprit, made=0, calls=0)
        self.rows = GuardedRows(lambda: Frail(self.said), VOCAB)
        self.batch, self.told = Batch([], None, self.rows), []
        self.totals, self.telemetry = Totals(), Telemetry()
        self.telemetry.draft_fault = self.told.append
        self.join(*firsts)

    def join(self, *firsts):
        self.rows.prepare_append([[first] for first in firsts], [None] * len(firsts)).commit()
        for first in firsts:
            sequence = Sequence(Request(id=str(first)), print, prompt_ids=[first])
            sequence.processed_ids = [first]
            self.batch.sequences.append(sequence)
        self.book()

    def book(self):
        book_faults(self.batch, self.totals, self.telemetry)

    def round(self):
        """Whether each row got its draft; what a row proposes shows that it holds all its tokens."""
        count = len(self.batch.sequences)
        found = self.rows.draft([5] * count, [2] * count, [None] * count)
        for sequence, ids in zip(self.batch.sequences, found, strict=True):
            assert ids in ([], [len(sequence.processed_ids)] * 2)
        self.rows.commit([[5]] * count)
        for sequence in self.batch.sequences:
            sequence.processed_ids.append(5)
        self.book()
        self.rows.check_integrity()
        return [bool(ids) for ids in found]


@pytest.mark.parametrize("where", ["draft", "commit", "append"])
def test_a_row_that_brings_the_drafter_down_loses_its_own_speculation(where):
    """Others pay for the first fault and for the one that tells which row it was."""
    side = Side(where, 1, BAD, 2)
    rounds = [side.round() for _ in range(64)]
    others = [first and last for first, _, last in rounds]
    assert others.count(False) <= 8
    assert all(others[40:56]), "and less and less often for its new attempts"
    assert sum(bad for _, bad, _ in rounds) <= (8 if where == "commit" else 0)
    assert side.said.made <= 10
    assert side.batch.sequences[1].counts["draft_errors"] >= len(side.told) - 1 > 2


@pytest.mark.parametrize("where", ["draft", "commit", "make", "append"])
def test_healthy_rounds_restore_trust(where):
    side = Side("", 1, 2, culprit=lambda ids: True)
    assert side.round() == [True, True]
    side.said.where = where
    if where in ("make", "append"):
        side.rows._fail("something", RuntimeError("that is over"), [])
        side.rows.filter([0, 1])
    for _ in range(9):
        side.round()
    side.said.where = ""
    first = next(index for index in range(99) if side.round() == [True, True])
    assert first < 20
    for _ in range(2 * FORGIVEN):
        assert side.round() == [True, True]
    side.said.calls = 0
    assert side.round() == [True, True]
    assert side.said.calls == 1, "rows are asked together again"


def test_one_fault_is_told_once_and_booked_on_the_rows_it_concerned():
    side = Side("draft", 1, 2, culprit=lambda ids: True)
    assert side.round() == [False, False]
    side.said.where = ""
    assert [side.round() for _ in range(4)] == [[True, True]] * 4
    assert side.told == ['draft: RuntimeError("a drafter\'s own fault")']
    assert [s.counts["draft_errors"] for s in side.batch.sequences] == [1, 1]


class Remembering(Frail):
    """Cannot be refilled from ids, only from what it says of a row, as drafters that see the target."""

    def capture(self, row):
        ids = self._rows[row].ids
        facts = {"tokens": len(ids), "ids": " ".join(map(str, ids))}
        return Attachment("own", "toy", facts)

    def prepare_append(self, tokens, attachments):
        known = [a.metadata["ids"].split() if a else [] for a in attachments]
        fits = [len(own) == len(ids) for own, ids in zip(known, tokens, strict=True)]
        filled = [list(map(int, own)) * fit for own, fit in zip(known, fits, strict=True)]
        return super().prepare_append(filled, attachments)


@pytest.mark.parametrize("where", ["draft", "commit"])
def test_neighbours_of_a_fault_keep_what_only_the_drafter_knows(where):
    said = SimpleNamespace(where="", culprit=lambda ids: ids[:1] == [BAD], made=0, calls=0)
    rows = GuardedRows(lambda: Remembering(said), VOCAB)
    rows.prepare_append([[]] * 3, [None] * 3).commit()
    rows.prefill([[1], [BAD], [2]])
    if where == "commit":
        rows._places[1].suspect()  # fed alone: so its fault comes when row 0 and 2 have been fed
    said.where, lost = where, 0
    for held in range(1, 31):
        found = rows.draft([5] * 3, [2] * 3, [None] * 3)
        assert all(found[row] in ([], [held] * 2) for row in (0, 2)), "nothing is missing"
        lost += [] in (found[0], found[2])
        rows.commit([[5]] * 3)
        rows.check_integrity()
    assert said.made >= 2
    assert lost <= 2


def test_new_rows_speculate_beside_one_that_cannot():
    side = Side("draft", BAD)
    for _ in range(20):
        side.round()
    side.join(7)
    assert [side.round()[1] for _ in range(30)].count(True) >= 28
    side.rows.filter([1])
    side.batch.sequences = side.batch.sequences[1:]
    assert side.round() == [True]


def test_a_proposal_that_cannot_be_costs_its_row_only(monkeypatch):
    side = Side("", 1, 2)
    unsure = Proposal([1, 2], [0.5, float("nan")])
    for wrong in ([1, 2, 3], [VOCAB], [-1], unsure, Proposal([1], [1.5])):
        with monkeypatch.context() as patch:
            found = [wrong, [3, 4]]
            patch.setattr(side.rows._rows, "draft", lambda *asked, found=found: found)
            assert side.rows.draft([5, 5], [2, 2], [None] * 2) == [[], [3, 4]]
        side.book()
        assert len(side.told) == 1
        rounds = [side.round() for _ in range(8)]
        assert all(good for _, good in rounds), "what the other one has is kept"
        assert rounds[-1] == [True, True]
        assert side.said.made == 1
        side = Side("", 1, 2)


def test_a_confidence_may_be_rounded(monkeypatch):
    side = Side("", 1)
    sure = [Proposal([3, 4], [1.0000001, 1.0])]
    monkeypatch.setattr(side.rows._rows, "draft", lambda *asked: sure)
    assert side.rows.draft([5], [2], [None]) == [[3, 4]]
    side.book()
    assert side.told == []


def test_rows_that_cannot_join_cost_speculation_only():
    side = Side("", 1)

    def broken():
        raise RuntimeError("cannot be swapped in")

    change = side.rows.prepare_append([[7]], [None])
    change._change.commit = broken
    change.commit()
    assert side.rows.size == 2
    side.batch.sequences.append(Sequence(Request(id="7"), print, processed_ids=[7]))
    side.book()
    assert len(side.told) == 1
    assert [side.round() for _ in range(8)][-1] == [True, True]


def test_rows_that_have_not_joined_yet_are_left_alone():
    """While a saved state is read, the batch has sequences and no rows."""
    side = Side("make", 1)
    side.rows.filter([])
    side.said.where = ""
    booked = dict(side.batch.sequences[0].counts)
    side.book()
    assert side.batch.sequences[0].counts == booked
    side.rows.prepare_append([[1]], [None]).commit()
    assert side.round() == [True]


def test_waits_double_and_end():
    trust, waits = Trust(), []
    for _ in range(4):
        trust.strike()
        waits.append(trust.barred)
        while trust.barred:
            trust.round()
    assert waits == [2, 4, 8, 16]
    for _ in range(FORGIVEN):
        assert trust.strikes
        trust.round()
    assert (trust.strikes, trust.healthy) == (0, 0)


def test_many_faults_in_an_engine_do_not_end_speculation(capsys):
    prompt, length = prompt_ids(20), 120
    with serving("flow=plain", "drafter=none", "tier=none", recipe="tiny") as engine:
        plain = engine.generate(prompt, max_tokens=length, ignore_eos=True)["token_ids"]
    ours = (ORACLE, "flow=speculative", "depth.max=1", "tier=none", "telemetry.trace=true")
    with serving(*ours, "+drafter.fail_every=4") as engine:
        part = engine.pipeline.parts["drafter"]
        part.book = [prompt + plain]
        answers = [engine.generate(prompt, max_tokens=length, ignore_eos=True) for _ in range(2)]
        counts = engine.stats()["counts"]
        part.fail_every = 0
        healthy = engine.generate(prompt, max_tokens=length, ignore_eos=True)
    assert [answer["token_ids"] for answer in answers] == [plain] * 2
    assert counts["draft_faults"] > 8
    assert capsys.readouterr().err.count("drafter failed in draft") == counts["draft_faults"]
    assert healthy["speculation"]["accepted"] == healthy["speculation"]["drafted"] == length // 2
