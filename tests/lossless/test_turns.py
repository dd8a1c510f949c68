"""The next turn of a chat, whose prompt repeats the last one only up to a point."""

from __future__ import annotations

import pytest
from support import prompt_ids, serving

# Ends the prompt inside a thinking section, and forgets what was thought once the turn is history.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
ASKED = {"role": "user", "content": "Which way does the river flow past the mill?"}
MORE = [
    {"role": "assistant", "content": "it turns</think>West."},
    {"role": "user", "content": "And then?"},
]
CONFIGS = {
    "plain": ("flow=plain", "drafter=none"),
    "suffix": ("flow=speculative", "drafter=suffix", "drafter.min_match=1", "drafter.remember=512"),
    "two_model": ("flow=speculative", "drafter=two_model", "draft_model=tiny"),
}
families = pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])


def engine_of(family, config, *more):
    second = (f"draft_model.family={family}",) if config == "two_model" else ()
    return serving(f"model.family={family}", *CONFIGS[config], *second, *more)


def common(one, other):
    """Length of the longest common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING)
    return f"model.template={path}"


@families
@pytest.mark.parametrize("config", ["plain", "suffix"])
def test_a_template_that_rewrites_the_last_turn(family, config, template):
    """Reuse reaches at least to the end of the last user turn, before the reply's header."""
    wanted = {"max_tokens": 20, "ignore_eos": True}
    with engine_of(family, config, template, "tier=ram") as engine:
        first = engine.generate([ASKED], **wanted)
        stable = len(engine.tokenizer.render([ASKED], {}, reply=False))
        warm = engine.generate([ASKED, *MORE], **wanted)
        assert warm["cached_tokens"] >= stable > 40
        whole = engine.tokenizer.render([ASKED, *MORE], {})
        assert warm["prompt_tokens"] == len(whole) > warm["cached_tokens"]
        saved = [*engine.tokenizer.render([ASKED], {}), *first["token_ids"][:-1]]
        assert (first["agreed_tokens"], warm["agreed_tokens"]) == (0, common(saved, whole))
    with engine_of(family, config, template, "tier=none") as engine:
        assert engine.generate([ASKED, *MORE], **wanted)["token_ids"] == warm["token_ids"]


@families
def test_an_answer_that_is_spelled_otherwise_when_it_comes_back(family):
    """Two tokens that the tokenizer would have made one: what is shared is shared, and no more."""
    first, wanted = prompt_ids(40), {"max_tokens": 12, "ignore_eos": True}
    with (
        engine_of(family, "plain", "tier=ram") as warm,
        engine_of(family, "plain", "tier=none") as cold,
    ):
        said = warm.generate(first, **wanted)["token_ids"]
        saved = [[*first, *said[:-1]]]
        for kept in (0, 1, 5, 11):
            prompt = first + said[:kept] + prompt_ids(9, seed=kept + 50)
            answer = warm.generate(prompt, **wanted)
            assert answer["token_ids"] == cold.generate(prompt, **wanted)["token_ids"]
            shared = len(first) + kept
            assert answer["cached_tokens"] <= shared
            assert answer["agreed_tokens"] == max(common(prompt, ids) for ids in saved)
            saved.append([*prompt, *answer["token_ids"][:-1]])
            if family == "llama":
                assert answer["cached_tokens"] == shared


@families
def test_a_drafter_is_as_good_after_a_restore_and_costs_no_reuse(family):
    """The drafter is the target: whatever it proposes is right, cold or warm."""
    wanted = {"max_tokens": 24, "ignore_eos": True}
    prompt = prompt_ids(60)
    grown = prompt[:54] + prompt_ids(6, seed=3)  # nine tenths of it are known
    reused = {}
    for config in ("plain", "two_model"):
        with engine_of(family, config, "tier=ram") as engine:
            answers = [engine.generate(ids, **wanted) for ids in (prompt, grown, prompt + grown)]
        reused[config] = [answer["cached_tokens"] for answer in answers]
        if config == "two_model":
            for answer in answers:
                spec = answer["speculation"]
                assert spec["accepted"] == spec["drafted"] > 0
    assert reused["plain"] == reused["two_model"]
    assert reused["plain"][-1] > 40
