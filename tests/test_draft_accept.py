"""The stages around the drafter and the rule: what goes wrong stays where it happened."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.drafting import book_faults
from pipeline.trace import Telemetry, Totals
from pipeline.types import NEUTRAL, Batch, GuardedRows, Proposal, Request, Sequence
from stages.accept import Accept
from stages.depth.fixed import Fixed
from stages.detokenize import Detokenize
from stages.draft import Draft
from stages.rules.match import Match
from stages.samplers.standard import Standard

TARGET = SimpleNamespace(eos_ids=frozenset({9}), vocab_size=16)
DRAFTER = SimpleNamespace(namespace="stub", can=frozenset())


def row(max_new=100, ignore_eos=False):
    sequence = Sequence(Request(id="r", ignore_eos=ignore_eos), print, prompt_ids=[1])
    sequence.max_new, sequence.pending = max_new, 1
    sequence.sampler = Standard().bind(NEUTRAL, 0, [1], None)
    return sequence


def scores(*best):
    logits = np.zeros((len(best), 16), dtype=np.float32)
    logits[np.arange(len(best)), best] = 5.0
    return logits


class Stub:
    """Draft rows that answer what they are told to."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def assign(self, owners):
        self.owners = owners

    def draft(self, pending, depths, samplers):
        self.calls.append((list(pending), list(depths)))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def prepare_append(self, tokens, attachments):
        return SimpleNamespace(commit=lambda: None)

    def close(self):
        pass


def drafted(answer, *rows, depth=4):
    stub = Stub(answer)
    guarded = GuardedRows(lambda: stub, TARGET.vocab_size)
    guarded.prepare_append([[]] * len(rows), [None] * len(rows)).commit()
    batch = Batch(list(rows), None, guarded)
    Draft(TARGET, DRAFTER, Fixed(max=depth)).run(batch)
    book_faults(batch, Totals(), Telemetry())
    return stub


def test_each_row_gets_its_proposal_up_to_its_first_eos():
    first, second = row(), row(ignore_eos=True)
    stub = drafted([[2, 9, 3], [2, 9, 3]], first, second)
    assert (first.proposal, second.proposal) == ([2, 9], [2, 9, 3])
    assert stub.calls == [([1, 1], [4, 4])]


def test_no_call_where_no_row_has_depth():
    last = row(max_new=1)
    last.proposal = [5]
    assert drafted([[1]], last).calls == []
    assert (last.depth, last.proposal) == (0, [])


@pytest.mark.parametrize("answer", [RuntimeError("lost"), [[1]]], ids=["raises", "rows missing"])
def test_a_failing_drafter_costs_the_rounds_speculation_only(answer, caplog):
    rows = [row(), row()]
    drafted(answer, *rows)
    for sequence in rows:
        assert (sequence.proposal, sequence.error) == ([], None)
        assert sequence.counts == {"draft_errors": 1}
    assert "the drafter failed (draft)" in caplog.text


@pytest.mark.parametrize("wrong", [[1, 2, 3, 4, 5], [99], [-1]])
def test_an_impossible_proposal_costs_its_row_only(wrong):
    rows = [row(), row()]
    drafted([wrong, [1]], *rows)
    assert [sequence.proposal for sequence in rows] == [[], [1]]
    assert [sequence.counts for sequence in rows] == [{"draft_errors": 1}, {}]


class Undecided:
    """A constraint that cannot tell what is legal."""

    def legal(self, token_ids):
        raise RuntimeError("too deep")


@pytest.mark.parametrize("drawn", [False, True])
def test_a_constraint_that_fails_costs_its_own_rows_proposal(drawn, caplog):
    rows, draft = [row(), row(), row()], Proposal([2, 3], scores=[scores(2)[0]] * 2 * drawn)
    rows[1].sampler.matcher = Undecided()
    drafted([draft] * 3, *rows)
    assert [sequence.proposal for sequence in rows] == [[2, 3], [], [2, 3]]
    assert [sequence.error for sequence in rows] == [None] * 3
    assert "a proposal for r cannot be used" in caplog.text


def accept(*rows):
    Accept(TARGET, Match()).run(Batch(list(rows), None, None))


def test_rows_walk_their_own_windows():
    first, second = row(), row()
    first.proposal, first.scores = [2, 3], scores(2, 4, 5)
    second.scores = scores(7)
    accept(first, second)
    assert ([e.token_id for e in first.emitted], first.accepted) == ([2, 4], 1)
    assert ([e.token_id for e in second.emitted], second.accepted) == ([7], 0)


def test_scores_that_are_not_finite_fail_their_row_only():
    bad, good = row(), row()
    bad.scores, good.scores = scores(2) * np.nan, scores(3)
    accept(bad, good)
    assert isinstance(bad.error, FloatingPointError)
    assert (bad.emitted, good.error, good.emitted[0].token_id) == ([], None, 3)


def test_rows_that_are_not_live_or_not_scored_emit_nothing():
    gone, waiting = row(), row()
    gone.cancelled, gone.scores = True, scores(2)
    gone.emitted, gone.accepted = ["old"], 3
    accept(gone, waiting)
    assert (gone.emitted, gone.accepted, waiting.emitted) == ([], 0, [])


def test_the_walk_ends_with_the_budget_and_ignores_eos_where_asked():
    short, through = row(max_new=2), row(ignore_eos=True)
    short.output_ids = [8]
    for sequence in (short, through):
        sequence.proposal, sequence.scores = [9, 3], scores(9, 3, 4)
    accept(short, through)
    assert [e.token_id for e in short.emitted] == [9]
    assert [e.token_id for e in through.emitted] == [9, 3, 4]


def test_anything_numpy_can_read_is_scores():
    class Lazy:
        def __array__(self, dtype=None, copy=None):
            return scores(6)

    sequence = row()
    sequence.scores = Lazy()
    accept(sequence)
    assert sequence.emitted[0].token_id == 6


STAGE_FIELDS = {f.name for f in dataclasses.fields(Sequence)} - {
    "deliver", "cancelled", "error", "ready", "submitted", "timings", "entered", "counts",
    "drafted_by_position", "accepted_by_position",
}  # fmt: skip


class Watched(Sequence):
    """Notes which fields stages touch. `live` asks for finish_reason on the engine's behalf."""

    def __getattribute__(self, name):
        if name in STAGE_FIELDS:
            object.__getattribute__(self, "__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        if name in STAGE_FIELDS:
            self.__dict__.setdefault("_written", set()).add(name)
        super().__setattr__(name, value)


def test_stages_touch_what_they_declare_and_nothing_else():
    request = Request(id="r", stop=("x",), prompt_logprobs=0)
    sequence = Watched(request, lambda event: None, prompt_ids=[1], max_new=9)
    sequence.sampler, sequence.pending = Standard().bind(NEUTRAL, 0, [1], None), 1
    tokenizer = SimpleNamespace(decoder=lambda shown: SimpleNamespace(push=str, flush=str))
    target = SimpleNamespace(**vars(TARGET), tokenizer=tokenizer)
    batch = Batch([sequence], None, Stub([[2, 3]]))
    for stage in (
        Draft(target, DRAFTER, Fixed(max=2)), Accept(target, Match()), Detokenize(target),
    ):  # fmt: skip
        sequence.scores = scores(2, 4, 5)
        sequence.__dict__.update(_read=set(), _written=set())
        stage.run(batch)
        own = stage.reads | stage.writes
        assert sequence.__dict__["_read"] - {"finish_reason"} <= own
        assert sequence.__dict__["_read"] - {"finish_reason"} >= stage.reads
        assert sequence.__dict__["_written"] == stage.writes
    assert (sequence.error, sequence.kept, sequence.output_ids) == (None, 2, [2, 4])
