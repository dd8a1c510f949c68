"""The promise everything else rests on: the same request gives the same tokens.

Speculative == plain, for drafters that are right, often wrong and always wrong; float32, no exception.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from support import ORACLE, prompt_ids, serving

FAMILIES = ["llama", "gemma3", "qwen3_5"]
DRAFTERS = {
    "right": (ORACLE,),
    "often wrong": (ORACLE, "+drafter.wrong_every=3"),
    "always wrong": (ORACLE, "+drafter.wrong_every=1"),
    "full prefill": (ORACLE, "+drafter.wrong_every=4", "+drafter.prefill=full"),
    "faulty": (ORACLE, "+drafter.fail_every=3"),
    "losing": (ORACLE, "+drafter.lose_every=13"),
    "random": ("drafter=random",),
    "ngram": ("drafter=ngram", "drafter.min_ngram=1"),
}
SAMPLING = {
    "greedy": {},
    "nucleus": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "seed": 3,
    },
}
LENGTH, PROMPT = 60, prompt_ids(31)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def plain(family):
    """Token ids of plain decoding, by sampling."""
    with serving(f"model.family={family}", "flow=plain", "drafter=none", "tier=none") as engine:
        return {
            name: engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True, **wanted)["token_ids"]
            for name, wanted in SAMPLING.items()
        }


def test_plain_decoding_equals_forwards_without_any_cache(family, plain):
    with serving(f"model.family={family}", "flow=plain", "drafter=none", "tier=none") as engine:
        model = engine.pipeline.parts["model"]

        def uncached() -> list[int]:
            ids = list(PROMPT)
            for _ in range(24):
                hidden = model.hidden(mx.array([ids]), None)
                ids.append(int(mx.argmax(model.head(hidden)[0, -1]).item()))
            return ids[len(PROMPT) :]

        assert engine.exclusive(uncached) == plain["greedy"][:24]


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_equals_plain(family, plain, drafter, depth):
    overrides = (*DRAFTERS[drafter], f"depth.max={depth}", "tier=none")
    with serving(f"model.family={family}", "flow=speculative", *overrides) as engine:
        part = engine.pipeline.parts["drafter"]
        for name, wanted in SAMPLING.items():
            part.book = [PROMPT + plain[name]]
            got = engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True, **wanted)
            assert got["token_ids"] == plain[name], name
            assert got["completion_tokens"] == LENGTH
            assert got["finish_reason"] == "length"
            spec = got["speculation"]
            assert spec["accepted"] <= spec["drafted"]
            if drafter == "right":
                assert spec["accepted"] == spec["drafted"] > 0
                assert spec["rounds"] == -(-LENGTH // (depth + 1))
            if drafter == "always wrong":
                assert spec["accepted"] == 0
                assert spec["rounds"] == LENGTH


def test_plain_output_varies(plain):
    """The checkpoints are no degenerate ones: a constant answer would hide faults."""
    assert len(set(plain["greedy"])) > 5
    assert plain["greedy"] != plain["nucleus"] != plain["penalties"]


def test_draft_rows_that_cannot_be_made_cost_speculation_only():
    """Every other making fails: the first is the rehearsal, the second the first request's."""
    with serving("flow=plain", "drafter=none", "tier=none") as engine:
        expected = engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)["token_ids"]
    settings = ("flow=speculative", ORACLE, "+drafter.deny_every=2", "depth.max=3", "tier=none")
    with serving(*settings) as engine:
        part = engine.pipeline.parts["drafter"]
        part.book = [PROMPT + expected]
        for _ in range(2):
            got = engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)
            assert got["token_ids"] == expected and got["speculation"]["accepted"] > 0
        assert part.made >= 4
        part.deny_every = 1
        got = engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)
        assert got["token_ids"] == expected and got["speculation"]["drafted"] == 0
