"""What every sampler option promises."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.errors import RequestError
from pipeline.types import NEUTRAL, Sampling

GROUP = "sampler"
LOGITS = np.random.default_rng(0).normal(size=500).astype(np.float32) * 3


@pytest.fixture
def sampler(option):
    part = option()
    part.open()
    yield part
    part.close()
    part.close()


def bind(sampler, seed=1, logprobs=None, prompt=(5, 6), **said):
    resolved = Sampling(**said).over(sampler.defaults).over(NEUTRAL)
    return sampler.bind(resolved, seed, list(prompt), logprobs)


def test_defaults_are_a_sampling_of_its_own_settings(sampler):
    assert isinstance(sampler.defaults, Sampling)
    assert isinstance(sampler.can, frozenset)


def test_same_seed_and_position_same_token_whatever_was_drawn_before(sampler):
    first, second = bind(sampler, temperature=1.0), bind(sampler, temperature=1.0)
    tokens = [first.draw(LOGITS, p)[0] for p in range(30)]
    assert [second.draw(LOGITS, p)[0] for p in reversed(range(30))] == tokens[::-1]


def test_a_draw_changes_neither_the_sampler_nor_the_scores(sampler):
    row = bind(sampler, temperature=1.0, presence_penalty=2.0, logprobs=3)
    before = LOGITS.copy()
    assert row.draw(LOGITS, 3) == row.draw(LOGITS, 3)
    assert np.array_equal(before, LOGITS)


def test_a_draw_takes_read_only_scores(sampler):
    frozen = LOGITS.copy()
    frozen.flags.writeable = False
    row = bind(sampler, temperature=0.7, top_p=0.9, logit_bias=((3, 1.0),), frequency_penalty=1.0)
    row.push(3)
    assert 0 <= row.draw(frozen, 0)[0] < 500


def test_greedy_rows_draw_the_argmax(sampler):
    row = bind(sampler, temperature=0.0)
    if row.greedy:
        assert row.draw(LOGITS, 0) == (int(LOGITS.argmax()), None)


def test_request_over_recipe(sampler):
    row = bind(sampler, temperature=1e-6, top_p=1.0, presence_penalty=50.0)
    best, second = np.argsort(-LOGITS)[:2]
    assert row.draw(LOGITS, 0)[0] == best
    row.push(int(best))
    assert row.draw(LOGITS, 1)[0] == second


def test_logprobs_only_where_asked(sampler):
    assert bind(sampler).draw(LOGITS, 0)[1] is None
    token, logprob = bind(sampler, logprobs=4).draw(LOGITS, 0)
    assert logprob.token_id == token
    assert len(logprob.top) == 4
    assert [v for _, v in logprob.top] == sorted((v for _, v in logprob.top), reverse=True)
    assert logprob.logprob <= 0


@pytest.mark.parametrize("said", [{"temperature": math.nan}, {"top_p": 7.0}, {"min_p": -1.0}])
def test_numbers_out_of_range_are_the_requests_fault(sampler, said):
    with pytest.raises(RequestError):
        bind(sampler, **said)
