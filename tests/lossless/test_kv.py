"""Under every KV policy: speculative == plain, batched == alone, warm == cold, each with itself."""

from __future__ import annotations

from pathlib import Path

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


SETTINGS = [("gemma3", kv) for kv in POLICIES]  # windows and full layers
SETTINGS += [("llama", "kv8"), ("falcon_h1", "kv4"), ("gemma4", "turboquant")]
SETTINGS += [("gemma3", "kv4", "kv.start=40"), ("llama", "turboquant", "kv.start=60")]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def setting(request, tmp_path_factory):
    """A model of heads that can be coded, under a policy."""
    family, kv, *more = request.param
    chosen = [f"model.family={family}", "model.head_size=64", f"kv={kv}", *more]
    if kv == "per_layer":
        place = tmp_path_factory.mktemp("map") / "kv_config.json"
        place.write_text(
            '[{"layer_idx": 1, "k_bits": 8, "v_bits": 3}, {"layer_idx": 2, "bits": 4}]'
        )
        chosen.append(f"kv.map={place}")
    return tuple(chosen)


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


@pytest.mark.parametrize(
    ("drafter", "depth"), [*((name, 8) for name in DRAFTERS), ("often wrong", 1)]
)
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
    """Prompts that share more and more are answered alike with and without reuse."""
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
    assert warm == cold


@pytest.mark.parametrize("chunk", [32, 512])
def test_warm_equals_cold(setting, chunk):
    warm_and_cold(setting, f"stage.chunked_prefill.chunk={chunk}")


def test_a_policy_does_something(setting, plain):
    """Else the above would be about native rows; an exact one gives what native gives."""
    model = [text for text in setting if not text.startswith("kv")]
    with serving(*model, *PLAIN) as engine:
        native = [answer(engine, prompt)["token_ids"] for prompt in PROMPTS]
    assert (native == plain["greedy"]) == (setting[2] in {f"kv={kv}" for kv in EXACT})


@pytest.mark.real
@pytest.mark.parametrize("kv", POLICIES)
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
