"""Every family of `model=tiny` keeps the promise; the other files here go deeper on three of them.

Each holds layers of another kind: recurrent (qwen3_next, qwen3_5), latent (deepseek_v3), windows with
learned sinks (gpt_oss), keys shared between layers (gemma4), composites (falcon_h1).
"""

from __future__ import annotations

import re

import mlx.core as mx
import pytest
from support import ORACLE, prompt_ids, serving, together
from sweep_models import verdict

from stages.models.loading.families import FAMILIES

PROMPTS = [prompt_ids(n, seed=n) for n in (3, 16, 31)]
WANTED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
LENGTH = 24
DRAFTERS = {
    "right": (ORACLE,),
    "often wrong": (ORACLE, "+drafter.wrong_every=3"),
    "always wrong": (ORACLE, "+drafter.wrong_every=1"),
    "full prefill": (ORACLE, "+drafter.wrong_every=4", "+drafter.prefill=full"),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def engine(family):
    with serving(f"model.family={family}", "flow=plain", "drafter=none", "tier=none") as engine:
        yield engine


def answers(engine, prompts, **wanted):
    return [
        engine.generate(prompt, max_tokens=LENGTH, ignore_eos=True, **wanted)["token_ids"]
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def greedy(engine):
    return answers(engine, PROMPTS)


@pytest.fixture(scope="module")
def sampled(engine):
    return answers(engine, PROMPTS, **WANTED)


def test_plain_equals_forwards_without_any_cache(engine, greedy):
    model, ids = engine.pipeline.parts["model"], list(PROMPTS[-1])

    def uncached() -> None:
        for _ in range(LENGTH):
            scores = model.head(model.hidden(mx.array([ids]), None))
            ids.append(int(mx.argmax(scores[0, -1]).item()))

    engine.exclusive(uncached)
    assert ids[len(PROMPTS[-1]) :] == greedy[-1]
    assert len(set(greedy[-1])) > 5  # a constant answer would hide faults


def test_together_equals_alone(engine, greedy):
    for order in ((0, 1, 2), (2, 1, 0)):
        results = together(engine, [PROMPTS[i] for i in order], max_tokens=LENGTH, ignore_eos=True)
        assert [r["token_ids"] for r in results] == [greedy[i] for i in order]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculative_equals_plain_alone_and_together(family, greedy, sampled, drafter):
    overrides = ("flow=speculative", "depth.max=3", "tier=none", *DRAFTERS[drafter])
    with serving(f"model.family={family}", *overrides) as engine:
        part = engine.pipeline.parts["drafter"]
        for wanted, expected in (({}, greedy), (WANTED, sampled)):
            part.book = [p + ids for p, ids in zip(PROMPTS, expected, strict=True)]
            assert answers(engine, PROMPTS, **wanted) == expected
            wide = together(engine, PROMPTS, max_tokens=LENGTH, ignore_eos=True, **wanted)
            assert [r["token_ids"] for r in wide] == expected


def test_warm_equals_cold(family, engine):
    """After every shared length, and when a chat grows by what was said."""
    base, reused = prompt_ids(40), 0
    overrides = ("flow=speculative", ORACLE, "+drafter.wrong_every=2", "depth.max=3", "tier=ram")
    with serving(f"model.family={family}", *overrides) as warm:
        answers(warm, [base])
        for shared in (0, 10, 20, 30, 39, 40):
            prompt = base[:shared] + prompt_ids(5, seed=1000 + shared)
            assert answers(warm, [prompt]) == answers(engine, [prompt]), shared
        chat = list(base)
        for turn in range(3):
            result = warm.generate(chat, max_tokens=LENGTH, ignore_eos=True)
            assert [result["token_ids"]] == answers(engine, [chat])
            reused += result["cached_tokens"]
            chat = chat + result["token_ids"] + prompt_ids(5, seed=turn)
        warm.pipeline.parts["tier"][0].check_integrity()
    assert reused >= 39 + 63 + 92


SWEPT = [
    "cohere2", "exaone4", "gemma2", "granitemoehybrid", "jamba", "lfm2", "mimo_v2_flash", "ministral3",
    "olmo3", "phi3", "plamo2", "qwen2", "qwen3_moe", "rwkv7",
]  # fmt: skip


@pytest.mark.parametrize("family", SWEPT)
def test_other_families_give_mlx_lms_own_tokens_in_ragged_rows(family, tmp_path):
    """The others are in docs/models.md: `python tests/sweep_models.py` runs them all."""
    found = verdict(family, str(tmp_path))
    assert (found.outcome, found.note) == ("runs", "")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("deepseek_v41", r"LayerCache in layers \[0, 1\].*add a layout"),
        ("plamo3", "asks for a window of 13 of a layer that keeps 12"),
        ("gpt_bigcode", "does not run on rows of unequal length.*Choose another model"),
    ],
)
def test_what_cannot_run_is_refused_when_it_opens(family, said, tmp_path):
    found = verdict(family, str(tmp_path))
    assert found.outcome == "refused" and re.search(said, found.note)
