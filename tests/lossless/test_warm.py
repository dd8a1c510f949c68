"""Warm == cold for every shared length, on full and on windowed layers, with and without a drafter."""

from __future__ import annotations

import pytest
from support import ORACLE, prompt_ids, serving

BASE = prompt_ids(48)
CONFIGS = {
    "plain": ("flow=plain", "drafter=none"),
    "wrong": ("flow=speculative", ORACLE, "+drafter.wrong_every=2", "depth.max=4"),
}


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_5"])
def family(request):
    return request.param


@pytest.fixture(scope="module", params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def warm(family, config):
    with serving(f"model.family={family}", "tier=ram", *config) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(family, config):
    with serving(f"model.family={family}", "tier=none", *config) as engine:
        yield lambda ids: answer(engine, ids)


def answer(engine, ids, length=12):
    result = engine.generate(ids, max_tokens=length, ignore_eos=True)
    return result["token_ids"], result["cached_tokens"]


def test_every_shared_length(warm, cold, family):
    answer(warm, BASE)
    for shared in range(0, len(BASE) + 1, 3):
        prompt = BASE[:shared] + prompt_ids(9, seed=1000 + shared)
        ids, cached = answer(warm, prompt)
        assert ids == cold(prompt)[0], shared
        assert cached <= len(prompt) - 1
        if family == "llama" and shared >= 16:
            assert cached == shared
    warm.pipeline.parts["tier"][0].check_integrity()


def test_the_same_prompt_again_reuses_all_but_its_last_token(warm, cold):
    first, none = answer(warm, BASE)
    again, cached = answer(warm, BASE)
    assert (first, none) == (again, 0) == (cold(BASE)[0], 0)
    assert cached == len(BASE) - 1


def test_a_growing_chat_reuses_what_was_said(warm, cold):
    prompt = list(BASE)
    for turn in range(5):
        ids, cached = answer(warm, prompt)
        assert ids == cold(prompt)[0]
        if turn:
            assert (
                len(prompt) - cached <= 10
            )  # this turn's 9 tokens and the last answer's pending one
        prompt = prompt + ids + prompt_ids(9, seed=turn)


def test_reused_and_fed_tokens_are_the_prompt(warm, monkeypatch):
    answer(warm, BASE)
    model, fed = warm.pipeline.parts["model"], []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda t, c: fed.append(t.shape) or hidden(t, c))
    prompt = BASE[:30] + prompt_ids(20, seed=5)
    _, cached = answer(warm, prompt, length=1)
    prefill = sum(width for _, width in fed[:-2] or fed)
    assert cached + prefill + 1 >= len(prompt) - 1
    assert prefill <= len(prompt) - cached


def test_namespaces_do_not_mix(family):
    with serving(f"model.family={family}", "tier=ram", "model.seed=1") as engine:
        tier = engine.pipeline.parts["tier"][0]
        answer(engine, BASE)
        spaces = engine.pipeline.stages["tokenize"]
        assert tier.lookup(BASE, "another", len(BASE)) is None
        assert spaces.target.artifact


def test_a_cancelled_row_publishes_nothing(warm):
    from support import Running

    run = Running(warm, prompt_ids(40, seed=77), max_tokens=4000, ignore_eos=True)
    next(iter(run))
    before = warm.stats()["tiers"]["ram"]["tokens"]
    run.ticket.cancel()
    list(run)
    warm.when_idle(lambda: None).result(10)
    assert warm.stats()["tiers"]["ram"]["tokens"] == before
