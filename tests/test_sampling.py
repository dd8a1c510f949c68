"""Sampling on the host: exact filter sets, the law of the draws, penalties, log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, RequestError
from pipeline.types import NEUTRAL, Sampling
from stages.samplers.filters import highest, inverse_temperature, survivors
from stages.samplers.noise import gumbel, uniform
from stages.samplers.standard import Standard


def row(seed=0, prompt=(), logprobs=None, **said):
    return Standard().bind(Sampling(**said).over(NEUTRAL), seed, list(prompt), logprobs)


def scores(*values):
    return np.array(values, dtype=np.float32)


def textbook(logits, temperature, top_k, top_p, min_p):
    """Survivors by a full sort: by score, then by id, filters one after the other."""
    scale = np.float32(1.0 / temperature)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    weights = np.exp((logits - logits.max()) * scale)
    if top_p < 1:
        total = float(weights[sorted(order)].sum(dtype=np.float64))
        mass, count = 0.0, 0
        while mass < top_p * total and count < len(order):
            mass, count = mass + float(weights[order[count]]), count + 1
        order = order[: max(count, 1)]
    return sorted(i for i in order if weights[i] >= np.float32(min_p))


few_values = st.sampled_from([-math.inf, -40.0, -3.0, -0.5, 0.0, 0.5, 2.0, 2.25, 9.0])
any_values = st.floats(-60, 60, width=32) | few_values
settings_of_filters = {
    "temperature": st.sampled_from([0.1, 0.8, 1.0, 3.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, 1000]),
    "top_p": st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.95, 0.999999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
}


@settings(max_examples=300, deadline=None)
@given(values=st.lists(any_values, min_size=1, max_size=40), **settings_of_filters)
def test_filters_keep_the_textbook_set(values, temperature, top_k, top_p, min_p):
    logits = np.array(values, dtype=np.float32)
    if not math.isfinite(logits.max()):
        return
    kept = survivors(logits, inverse_temperature(temperature), top_k, top_p, min_p)
    assert kept.tolist() == textbook(logits, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("shape", ["peaked", "flat", "equal", "tied", "one_hot"])
@pytest.mark.parametrize("top_p", [0.5, 0.95])
def test_filters_keep_the_textbook_set_of_a_large_vocabulary(shape, top_p):
    size, random = 20_000, np.random.default_rng(0)
    logits = {
        "peaked": random.normal(size=size) * 4,
        "flat": random.normal(size=size) * 0.01,
        "equal": np.zeros(size),
        "tied": random.integers(-3, 3, size=size),
        "one_hot": np.where(np.arange(size) == 77, 0.0, -np.inf),
    }[shape].astype(np.float32)
    kept = survivors(logits, inverse_temperature(0.8), 0, top_p, 0.0)
    assert kept.tolist() == textbook(logits, 0.8, 0, top_p, 0.0)


def test_highest_breaks_ties_by_the_lower_id():
    assert highest(scores(1, 3, 2, 3, 3, 0), 2).tolist() == [1, 3]
    assert highest(scores(5, 5), 9).tolist() == [0, 1]


def test_noise_of_an_id_does_not_depend_on_the_other_candidates():
    some = np.array([3, 70, 41_000])
    assert np.array_equal(gumbel(5, 9, some), gumbel(5, 9, np.arange(49_152))[some])


def test_uniform_noise_is_uniform_and_uncorrelated_over_ids_positions_and_seeds():
    table = np.stack([uniform(seed, p, np.arange(512)) for seed in (0, 1) for p in range(64)])
    assert table.min() > 0
    assert table.max() < 1
    counts = np.histogram(table, bins=50, range=(0, 1))[0]
    expected = table.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 95  # chi-square, 49 dof, p ~ 1e-4
    centred = table - 0.5
    for shifted in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1)):
        assert abs((centred * shifted).mean() * 12) < 5 / math.sqrt(table.size)


def test_draws_over_positions_follow_the_law():
    logits = scores(1.0, 0.0, -1.0, 2.0, 0.5, -3.0)
    sampler, draws = row(seed=11, temperature=0.7), 20_000
    counts = np.bincount([sampler.draw(logits, p)[0] for p in range(draws)], minlength=6)
    law = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    assert ((counts - draws * law) ** 2 / (draws * law)).sum() < 25.7  # 5 dof, p ~ 1e-4


def test_draws_at_neighbouring_positions_are_independent():
    sampler = row(seed=2, temperature=1.0)
    draws = [sampler.draw(scores(0, 0), p)[0] for p in range(10_000)]
    agree = np.mean(np.array(draws[1:]) == np.array(draws[:-1]))
    assert abs(agree - 0.5) < 0.02


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    first, second = row(seed=4, temperature=1.0), row(seed=4, temperature=1.0)
    forward = [first.draw(logits, p)[0] for p in range(50)]
    backward = [second.draw(logits, p)[0] for p in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [row(seed=5, temperature=1.0).draw(logits, p)[0] for p in range(50)]
    assert len(set(forward)) > 25


def test_filters_do_not_change_the_draw_of_a_survivor():
    """Coupling: the same noise whatever was filtered, so a surviving winner still wins."""
    logits = np.random.default_rng(3).normal(size=300).astype(np.float32)
    for position in range(100):
        free = row(temperature=1.0).draw(logits, position)[0]
        cut = row(temperature=1.0, top_k=50).draw(logits, position)[0]
        assert cut == free or free not in highest(logits, 50)


def test_seeds_are_taken_as_http_takes_them():
    logits = np.zeros(50, dtype=np.float32)
    assert {row(seed=s, temperature=1.0).draw(logits, 0)[0] for s in (0, 2**63 - 1)}
    for seed in (-1, 2**63):
        with pytest.raises(
            ConfigError, match=rf"sampler\.seed: {seed} is not in \[0, 2\*\*63 - 1\]"
        ):
            Standard(seed=seed)


def test_greedy_takes_the_lowest_id_of_equal_scores():
    sampler = row()
    assert sampler.greedy
    assert sampler.draw(scores(0, 7, 7, 1), 3) == (1, None)


@pytest.mark.parametrize(
    "said", [{"temperature": 0.5}, {"presence_penalty": 1.0}, {"logit_bias": ((1, 2.0),)},
             {"repetition_penalty": 1.1}, {"logprobs": 0}]
)  # fmt: skip
def test_greedy_is_said_only_where_plain_argmax_is_enough(said):
    assert not row(**said).greedy


def test_presence_and_frequency_see_the_output_only():
    sampler = row(prompt=[0, 0], presence_penalty=1.0, frequency_penalty=0.5)
    logits = scores(3.0, 2.9, 0.0)
    assert sampler.draw(logits, 0)[0] == 0
    sampler.push(0)  # 3.0 - 1.0 - 0.5
    assert sampler.draw(logits, 1)[0] == 1
    sampler.push(1)  # 2.9 - 1.5
    assert sampler.draw(logits, 2)[0] == 0
    sampler.push(0)  # 3.0 - 1.0 - 1.0
    assert sampler.draw(logits, 3)[0] == 1


def test_repetition_sees_the_prompt_and_pushes_both_signs_down():
    sampler = row(prompt=[0], repetition_penalty=2.0)
    assert sampler.draw(scores(3.0, 2.0), 0)[0] == 1
    assert sampler.draw(scores(-1.0, -1.5), 0)[0] == 1
    sampler.push(1)
    assert sampler.draw(scores(-1.0, -1.5), 1)[0] == 0


def test_history_grows_past_its_first_room():
    sampler = row(prompt=range(3), repetition_penalty=1.5, frequency_penalty=1.0)
    for token in range(200):
        sampler.push(token)
    logits = np.ones(201, dtype=np.float32)
    assert sampler.draw(logits, 0)[0] == 200
    assert logits.tolist() == [1.0] * 201  # a draw changes nothing


def test_bias_is_added_first_and_refused_outside_the_vocabulary():
    assert row(logit_bias=((2, 5.0),)).draw(scores(1, 2, 0), 0)[0] == 2
    with pytest.raises(RequestError, match="outside the vocabulary of 3"):
        row(logit_bias=((3, 5.0),)).draw(scores(1, 2, 0), 0)


def test_logprobs_come_after_penalties_and_before_temperature_and_filters():
    sampler = row(temperature=0.01, top_k=1, presence_penalty=1.0, logprobs=3)
    sampler.push(0)
    token, logprob = sampler.draw(scores(2.0, 1.5, 1.5, -1.0), 0)
    changed = np.array([1.0, 1.5, 1.5, -1.0])
    law = changed - np.log(np.exp(changed).sum())
    assert token == 1 and logprob.token_id == 1
    assert logprob.logprob == pytest.approx(law[1], abs=1e-6)
    assert [token for token, _ in logprob.top] == [1, 2, 0]
    assert [value for _, value in logprob.top] == pytest.approx([law[1], law[2], law[0]], abs=1e-6)


def test_no_top_logprobs_asked_none_given():
    assert row(logprobs=0).draw(scores(0, 0), 0)[1].top == ()


@pytest.mark.parametrize("said", [{}, {"temperature": 0.8, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_an_error(said, bad):
    with pytest.raises(FloatingPointError, match="not finite"):
        row(**said).draw(scores(0.0, bad, 1.0), 0)


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e9])
def test_extreme_temperatures_never_warn_or_fail(temperature):
    with np.errstate(all="raise", under="ignore", over="ignore"):
        token, _ = row(temperature=temperature, top_p=0.9).draw(scores(-50, 3, 2, -np.inf), 0)
    assert token in ((1,) if temperature < 1 else (0, 1, 2))


@pytest.mark.parametrize(
    ("said", "where"),
    [({"temperature": -1.0}, "temperature"), ({"temperature": math.nan}, "temperature"),
     ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"),
     ({"min_p": math.inf}, "min_p"), ({"repetition_penalty": 0.0}, "repetition_penalty")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_in_recipe_and_request(said, where):
    with pytest.raises(ConfigError, match=f"sampler.{where}"):
        Standard(**said)
    with pytest.raises(RequestError) as caught:
        row(**said)
    assert caught.value.param == where


def test_all_faults_of_a_recipe_are_listed():
    with pytest.raises(ConfigError) as caught:
        Standard(temperature=-1, top_p=2, logit_bias={-1: 3.0})
    assert [p.where for p in caught.value.problems] == [
        "sampler.temperature", "sampler.top_p", "sampler.logit_bias",
    ]  # fmt: skip
