"""What every acceptance rule promises about the walk over one window."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.types import NEUTRAL, Request, Sampling, Sequence
from stages.samplers.standard import Standard

GROUP = "rule"
V, EOS = 16, 9


def window(*best):
    logits = np.zeros((len(best), V), dtype=np.float32)
    logits[np.arange(len(best)), best] = 30.0
    return logits


@pytest.fixture(params=["greedy", "sampled"])
def make(request):
    said = {"greedy": {}, "sampled": {"temperature": 0.5}}[request.param]

    def sequence(proposal, **more):
        sampler = Standard().bind(Sampling(**said, **more).over(NEUTRAL), 3, [1, 2], None)
        row = Sequence(Request(id="r"), print, prompt_ids=[1, 2], sampler=sampler)
        row.proposal, row.output_ids = list(proposal), [4]
        return row

    return sequence


def walk(option, sequence, scores, limit=100, eos_ids=frozenset({EOS})):
    emitted, accepted = option().accept(sequence, scores, limit, eos_ids)
    return [e.token_id for e in emitted], accepted


@pytest.mark.parametrize("rejected_at", range(4))
def test_the_first_difference_is_corrected(option, make, rejected_at):
    proposal = [5, 6, 7]
    proposal[rejected_at:] = [0] * (3 - rejected_at)
    assert walk(option, make(proposal), window(5, 6, 7, 8)) == (
        [5, 6, 7, 8][: rejected_at + 1], rejected_at,
    )  # fmt: skip


def test_an_empty_proposal_is_an_ordinary_step(option, make):
    assert walk(option, make([]), window(5)) == ([5], 0)


@pytest.mark.parametrize("limit", range(5))
def test_nothing_is_emitted_beyond_the_limit(option, make, limit):
    assert walk(option, make([5, 6, 7]), window(5, 6, 7, 8), limit) == (
        [5, 6, 7, 8][:limit], min(limit, 3),
    )  # fmt: skip


def test_an_accepted_eos_counts_and_ends_the_walk(option, make):
    assert walk(option, make([5, EOS, 7]), window(5, EOS, 7, 8)) == ([5, EOS], 2)


def test_eos_as_correction_or_bonus_ends_the_walk_unaccepted(option, make):
    assert walk(option, make([5, 6]), window(5, EOS, 7)) == ([5, EOS], 1)
    assert walk(option, make([5]), window(5, EOS)) == ([5, EOS], 1)


def test_an_eos_draft_the_target_does_not_want_changes_nothing(option, make):
    assert walk(option, make([5, EOS]), window(5, 6, 7)) == ([5, 6], 1)


def test_no_eos_ids_no_end(option, make):
    assert walk(option, make([EOS]), window(EOS, 5), eos_ids=frozenset()) == ([EOS, 5], 1)


def test_penalties_see_only_what_is_emitted(option, make):
    row = make([5, 5], presence_penalty=40.0)
    scores = window(5, 5, 5)
    scores[:, 6] = 20.0
    assert walk(option, row, scores)[0] == [5, 6]
    again = np.zeros((1, V), dtype=np.float32)
    again[0, [5, 6, 7]] = 30.0, 30.0, 10.0
    row.proposal = []
    assert walk(option, row, again)[0] == [7]


def test_nothing_beyond_the_end_of_the_walk_is_read(option, make):
    scores = window(5, 6, 7)
    scores[1:] = np.nan
    assert walk(option, make([0, 6]), scores) == ([5], 0)
    with pytest.raises(FloatingPointError):
        walk(option, make([5, 6]), scores)


def test_sampled_tokens_are_those_of_plain_decoding(option):
    """Bursts of any proposal give the tokens that one-token steps give, or, from a rule that is
    exact in law only, the same tokens each time."""
    random = np.random.default_rng(5)
    table = random.normal(size=(40, V)).astype(np.float32)  # scores by position

    def run(propose):
        sampler = Standard().bind(
            Sampling(temperature=1.0, frequency_penalty=0.7).over(NEUTRAL), 7, [1, 2], None
        )
        row = Sequence(Request(id="r"), print, prompt_ids=[1, 2], sampler=sampler)
        while len(row.output_ids) < 30:
            start = len(row.output_ids)
            row.proposal = propose(start)
            row.output_ids += walk(
                option, row, table[start : start + 1 + len(row.proposal)], 30 - start, frozenset()
            )[0]
        return row.output_ids

    plain = run(lambda start: [])

    def right(start):
        return plain[start : start + 4]

    if "token_exact" not in option().can:
        assert len(run(right)) == 30 and run(right) == run(right)
        return
    assert run(right) == plain
    assert run(lambda start: [*plain[start : start + 2], 0, 1]) == plain
    assert run(lambda start: random.integers(0, V, size=3).tolist()) == plain
