"""Under every KV policy: speculative == plain, batched == alone, warm == cold, each with itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from support import ORACLE, prompt_ids, serving, together

CONF = Path(__file__).parents[2] / "conf" / "kv"
POLICIES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "native")
EXACT = {"paged"}  # policies that change no number
DRAFTERS = {
    "right": (ORACLE,),
    "often wrong": (ORACLE, "+drafter.wrong_every=3"),
    "always wrong": (ORACLE, "+drafter.wrong_every=1"),
    "full prefill": (ORACLE, "+drafter.wrong_every=4", "+drafter.prefill=full"),
    "ngram": ("drafter=ngram", "drafter.min_ngram=1"),
}
SAMPLING = {"greedy": {}, "nucleus": {"temperature": 0.8, "top_p": 0.95, "seed": 7}}
PROMPTS = [prompt_ids(n, seed=n) for n in (31, 3, 16, 50)]
LENGTH = 60
PLAIN = ("flow=plain", "drafter=none", "tier=none")


@pytest.fixture(scope="module", params=POLICIES)
def kv(request):
    return request.param


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def setting(request, kv):
    """A model of heads that can be coded, under this policy."""
    return f"model.family={request.param}", "model.head_size=64", f"kv={kv}"


def answer(engine, prompt, length=LENGTH, **wanted):
    return engine.generate(prompt, max_tokens=length, ignore_eos=True, **wanted)


@pytest.fixture(scope="module")
def plain(setting):
    """Token ids of plain decoding, by sampling and prompt."""
    with serving(*setting, *PLAIN) as engine:
        return {
            name: [answer(engine, prompt, **wanted)["token_ids"] for prompt in PROMPTS]
            for name, wanted in SAMPLING.items()
        }


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_equals_plain(setting, plain, drafter, depth):
    overrides = (*DRAFTERS[drafter], f"depth.max={depth}", "tier=none")
    with serving(*setting, "flow=speculative", *overrides) as engine:
        for name, wanted in SAMPLING.items():
            engine.pipeline.parts["drafter"].book = [PROMPTS[0] + plain[name][0]]
            got = answer(engine, PROMPTS[0], **wanted)
            assert got["token_ids"] == plain[name][0], name
            assert drafter != "right" or got["speculation"]["accepted"] > LENGTH // 3


@pytest.mark.parametrize("drafter", ["often wrong", "ngram"])
def test_batched_equals_alone(setting, plain, drafter):
    with serving(*setting, "flow=speculative", *DRAFTERS[drafter], "tier=none") as engine:
        engine.pipeline.parts["drafter"].book = [
            prompt + ids for prompt, ids in zip(PROMPTS, plain["greedy"], strict=True)
        ]
        for order in (PROMPTS, PROMPTS[::-1]):
            results = together(engine, order, max_tokens=LENGTH, ignore_eos=True)
            wanted = plain["greedy"] if order is PROMPTS else plain["greedy"][::-1]
            assert [r["token_ids"] for r in results] == wanted


def warm_and_cold(setting, *overrides):
    """Answers to prompts that share more and more, with and without reuse, and a warm engine."""
    base = prompt_ids(48)
    prompts = [base, *(base[:n] + prompt_ids(9, seed=1000 + n) for n in range(5, 48, 7)), base]
    with serving(*setting, *PLAIN, *overrides) as engine:
        cold = [answer(engine, prompt, 24)["token_ids"] for prompt in prompts]
    speculating = ("flow=speculative", "drafter=ngram", "tier=ram")
    with serving(*setting, *speculating, *overrides) as engine:
        results = [answer(engine, prompt, 24) for prompt in prompts]
        engine.pipeline.parts["tier"][0].check_integrity()
        assert results[-1]["cached_tokens"] == len(base) - 1
        warm = [result["token_ids"] for result in results]
        apart = [x for x in zip(prompts, cold, warm, strict=True) if x[1] != x[2]]
        for case in apart:
            assert engine.exclusive(partial(within_rounding, engine.pipeline.parts, *case))
    return apart


def within_rounding(parts, prompt, one, two):
    """Whether the two tokens where answers part have scores as near as 2x what the width of a forward
    changes in them: a rounding that falls the other way moves a code, which no float32 hides."""
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    ids, model = [*prompt, *one[:at]], parts["model"]

    def scores(width):
        rows = parts["kv"].rows(model, 9)
        rows.prepare_append([None]).commit()
        for start in range(0, len(ids), width):
            fed = ids[start : start + width]
            round = rows.begin([[*fed, *[0] * (width - len(fed))]])
            last = model.head(model.hidden(round.tokens_BW, round.caches))[0, len(fed) - 1]
            round.launch(last)
            round.resolve([len(fed)])
        return last

    ways = [scores(width) for width in (1, 9, len(ids) + 48)]
    noise = max(mx.abs(way - ways[0]).max().item() for way in ways)
    gap = mx.abs(ways[0][one[at]] - ways[0][two[at]]).item()
    print(f"parted at {at} after {len(prompt)}: gap {gap:.2e}, noise {noise:.2e}")
    return gap <= 2 * noise


def test_warm_equals_cold_where_every_forward_is_narrow(setting):
    assert warm_and_cold(setting, "stage.chunked_prefill.chunk=32") == []


def test_warm_equals_cold_but_for_roundings_of_wide_chunks(setting):
    assert len(warm_and_cold(setting)) <= 1


def test_a_policy_does_something(setting, plain, kv):
    """Else the above would be about native rows; an exact one gives what native gives."""
    with serving(*setting[:2], *PLAIN) as engine:
        native = [answer(engine, prompt)["token_ids"] for prompt in PROMPTS]
    assert (native == plain["greedy"]) == (kv in EXACT)


@pytest.mark.real
def test_a_real_model_talks_and_drafting_changes_nothing(kv):
    prompt = [{"role": "user", "content": "Name three rivers, then name the same three again."}]
    with serving("model=smollm2", f"kv={kv}", *PLAIN) as engine:
        plain = engine.generate(prompt, max_tokens=48, temperature=0.0)
    overrides = ("flow=speculative", "drafter=ngram", "tier=ram", "depth.max=8")
    with serving("model=smollm2", f"kv={kv}", *overrides) as engine:
        for _ in range(2):
            got = engine.generate(prompt, max_tokens=48, temperature=0.0)
            assert got["token_ids"] == plain["token_ids"]
        assert got["cached_tokens"] > 10
    assert "river" in plain["text"].lower()
