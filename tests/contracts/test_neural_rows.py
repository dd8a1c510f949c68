"""Rows of drafters that see the target: they follow it exactly, whatever way the tokens came."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import prompt_ids
from targets import Cpu, opened
from tiny_drafters import TINY, tiny_checkpoint

from pipeline.compose import compose
from pipeline.drafting import guarded
from pipeline.plan import plan
from stages.drafters.neural.rows import proposal
from stages.kv.native import Native
from stages.models.tiny import Tiny

TEXT, DEPTH = prompt_ids(24), 4


class Side:
    """A target's rows and a drafter's beside them, without an engine."""

    def __init__(self, target, drafter, count):
        self.target, self.drafter = target, drafter
        self.rows = Native().rows(target, DEPTH + 1)
        self.draft_rows = drafter.rows(target, DEPTH + 1)
        if hasattr(self.draft_rows, "watch"):
            self.draft_rows.watch(self.rows)
        self.rows.prepare_append([None] * count).commit()
        self.draft_rows.prepare_append([[]] * count, [None] * count).commit()

    def feed(self, inputs, keep=None, how="consume"):
        """One round of the target with these inputs, of which `keep` stay."""
        keep = keep or [len(ids) for ids in inputs]
        round = self.rows.begin(inputs)
        _, seen = self.target.tapped(round.tokens_BW, round.caches, self.drafter.taps)
        round.launch(seen)
        round.resolve(keep)
        kept = [ids[:n] for ids, n in zip(inputs, keep, strict=True)]
        getattr(self.draft_rows, how)(kept, seen)
        self.draft_rows.check_integrity()

    def draft(self, pending, depth=DEPTH):
        count = self.draft_rows.size
        return self.draft_rows.draft([pending] * count, [depth] * count, [None] * count)


@pytest.fixture(scope="module", params=sorted(TINY))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    overrides = tiny_checkpoint(request.param, folder)
    planned = plan(compose("tiny", ["flow=speculative", *overrides]))
    settings = planned.parts["model"].settings
    target = opened(Tiny(Cpu(), **{**settings, "cache_dir": str(folder)}))
    spec = planned.parts["drafter"]
    drafter = opened(spec.target(target, **spec.settings))
    yield target, drafter
    drafter.close()


def test_it_proposes_and_says_what_it_is(pair):
    _, drafter = pair
    assert ":" in drafter.namespace and drafter.weight_bytes > 0 and drafter.taps
    side = Side(*pair, 1)
    assert side.draft(5) == [[]], "nothing has been seen yet"
    side.feed([TEXT])
    (proposal,) = side.draft(5)
    assert 0 < len(proposal) <= DEPTH
    assert len(proposal.confidence) == len(proposal), "it says how sure it is: `grade`"
    assert all(0 <= sure <= 1 for sure in proposal.confidence)
    assert side.draft(5) == [proposal]
    assert side.draft(5, 2) == [proposal[:2]]


def test_chunks_and_rounds_equal_one_pass(pair):
    """Prefill in pieces, rounds with and without a draft, rejected tails: the same proposals."""
    whole, pieces = Side(*pair, 1), Side(*pair, 1)
    whole.feed([TEXT], how="prefill")
    pieces.feed([TEXT[:5]], how="prefill")
    pieces.feed([TEXT[5:12]], how="prefill")
    pieces.feed([[TEXT[12]]])
    pieces.draft(TEXT[13])
    pieces.feed([[*TEXT[13:16], 1, 2]], [3], how="commit")
    pieces.draft(TEXT[16])
    pieces.feed([[TEXT[16], 9]], [1], how="commit")
    for token in TEXT[17:]:
        pieces.feed([[token]])
    assert pieces.draft(7) == whole.draft(7)


def test_ragged_rows_are_each_as_alone(pair):
    lengths = (24, 3, 11)
    together = Side(*pair, 3)
    together.feed([TEXT[:n] for n in lengths], how="prefill")
    together.feed([TEXT[n : n + 2] if n < 20 else [] for n in lengths])
    alone = []
    for n in lengths:
        side = Side(*pair, 1)
        side.feed([TEXT[: n + 2] if n < 20 else TEXT[:n]])
        alone += side.draft(7)
    assert together.draft(7) == alone
    together.rows.filter([2, 0])
    together.draft_rows.filter([2, 0])
    assert together.draft(7) == [alone[2], alone[0]]


def test_a_captured_row_goes_on_as_if_it_had_stayed(pair):
    side = Side(*pair, 2)
    side.feed([TEXT[:9], TEXT], how="prefill")
    expected = side.draft(7)
    kept = side.draft_rows.capture(1)
    state = side.rows.capture(1, TEXT, "n")
    other = Side(*pair, 1)
    other.feed([TEXT[:4]])
    other.rows.prepare_append([state]).commit()
    change = other.draft_rows.prepare_append([TEXT], [kept])
    assert other.draft_rows.size == 1
    change.commit()
    change.dispose()
    other.draft_rows.check_integrity()
    assert other.draft(7)[1] == expected[1]
    assert kept is None or all(isinstance(t, mx.array) for t in kept.tensors)


def test_a_row_without_its_state_starts_cold_and_warms_up(pair):
    side = Side(*pair, 0)
    source = Side(*pair, 1)
    source.feed([TEXT[:10]])
    side.rows.prepare_append([source.rows.capture(0, TEXT[:10], "n")]).commit()
    wrong = source.draft_rows.capture(0)
    side.draft_rows.prepare_append([TEXT[:9]], [wrong]).commit()
    assert side.draft(7) == [[]], "a state of another length is none"
    side.feed([TEXT[10:]])
    assert len(side.draft(7)[0]) > 0


class Broken:
    greedy = False

    def __getattr__(self, name):
        raise RuntimeError("a row's own fault")


def test_a_rows_fault_leaves_its_neighbours_what_they_know(pair):
    """What the target showed cannot be had again, so it is carried over to the new rows."""
    side, calm = Side(*pair, 0), Side(*pair, 2)
    side.draft_rows = guarded(pair[1], pair[0], side.rows, DEPTH + 1)
    side.rows.prepare_append([None] * 3).commit()
    side.draft_rows.prepare_append([[]] * 3, [None] * 3).commit()
    side.feed([TEXT, TEXT[:5], TEXT[:9]], how="prefill")
    calm.feed([TEXT, TEXT[:9]], how="prefill")
    samplers = [None, Broken(), None]
    assert side.draft_rows.draft([7] * 3, [DEPTH] * 3, samplers) == [[]] * 3
    side.feed([[7, 8], [7], [7]], how="commit")
    calm.feed([[7, 8], [7]])
    side.draft_rows.draft([9] * 3, [0, DEPTH, 0], samplers)  # now it is known whose fault it is
    side.feed([[9], [9], [9]], how="commit")
    calm.feed([[9], [9]])
    found = side.draft_rows.draft([7] * 3, [DEPTH] * 3, [None] * 3)
    assert found == [calm.draft(7)[0], [], calm.draft(7)[1]]
    assert len(side.draft_rows.faults()[0]) == 2


def test_each_drawn_id_keeps_the_scores_it_was_drawn_from():
    ids, sure, scores = np.array([4, 5, 6]), np.array([0.5, 0.6, 0.7]), np.zeros(8)
    some = proposal(ids, sure, 2, [None, scores, scores])
    assert list(some) == [4, 5]
    assert some.scores[0] is None
    assert some.scores[1] is scores
    assert len(some.scores) == 2
    assert proposal(ids, sure, 3, [None] * 3).scores == []
