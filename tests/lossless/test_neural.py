"""Drafters with weights of their own keep the promise, and their rows follow the target's."""

from __future__ import annotations

import pytest
from support import prompt_ids, serving, together
from tiny_drafters import TINY, tiny_checkpoint

PROMPTS = [prompt_ids(n, seed=n) for n in (1, 9, 31)]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
LENGTH = 12


@pytest.fixture(scope="module", params=sorted(set(TINY) - {"nextn_glm"}))
def chosen(request, tmp_path_factory):
    """Overrides of a target and a drafter for it."""
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def plain(chosen):
    family = next(word for word in chosen if word.startswith("model."))
    with serving(family, "flow=plain", "drafter=none", "tier=none") as engine:
        return {name: answers(engine, **wanted) for name, wanted in KINDS.items()}


KINDS = {"greedy": {}, "sampled": SAMPLED}


def answers(engine, **wanted):
    return [
        engine.generate(prompt, max_tokens=LENGTH, ignore_eos=True, **wanted)["token_ids"]
        for prompt in PROMPTS
    ]


def test_alone_and_together_equal_plain(chosen, plain):
    with serving("flow=speculative", "depth.max=3", "tier=none", "debug=small", *chosen) as engine:
        assert answers(engine) == plain["greedy"]
        wanted = {"max_tokens": LENGTH, "ignore_eos": True, **SAMPLED}
        wide = together(engine, PROMPTS, **wanted)
        assert [r["token_ids"] for r in wide] == plain["sampled"]
        assert sum(r["speculation"]["drafted"] for r in wide) > 0
        assert not engine.stats()["counts"].get("faults")


def test_a_warm_start_goes_on_with_the_drafters_state(chosen, plain):
    """The next turn finds the drafter's own state beside the target's."""
    with serving("flow=speculative", "depth.max=3", "tier=ram", *chosen) as engine:
        first = engine.generate(PROMPTS[2], max_tokens=LENGTH, ignore_eos=True)
        chat = PROMPTS[2] + first["token_ids"]
        warm = engine.generate(chat, max_tokens=LENGTH, ignore_eos=True)
        assert warm["cached_tokens"] >= len(chat) - 2
    with serving("flow=plain", "drafter=none", "tier=none", chosen[0]) as engine:
        cold = engine.generate(chat, max_tokens=LENGTH, ignore_eos=True)
    assert warm["token_ids"] == cold["token_ids"]
