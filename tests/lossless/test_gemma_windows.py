"""A real model far past its window (Gemma 3 270M: 512): a prompt of 1,500 tokens."""

from __future__ import annotations

import pytest
from support import serving

from pipeline.lab import texts

TOKENS, PROMPT = 24, 1500


@pytest.mark.real
def test_three_windows_with_and_without_drafter_warm_and_cold():
    """The text repeats itself, so that the drafter proposes; depth 0 is decoding without one."""
    with serving("scheduler.step_tokens=null", recipe="gemma3_270m") as engine:
        parts = engine.pipeline.parts
        ids = parts["model"].tokenizer.encode(texts.prose(1, 60) * 3)[:PROMPT]
        assert len(ids) == PROMPT

        def ask(depth: int) -> dict:
            parts["depth"].max = depth
            return engine.generate(ids, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

        drafting = parts["depth"].max
        cold = ask(drafting)
        warm = ask(drafting)
        plain_warm = ask(0)
        engine.exclusive(parts["tier"][0].clear)
        plain_cold = ask(0)
    assert cold["speculation"]["drafted"] > 0 and plain_cold["speculation"]["drafted"] == 0
    assert [r["cached_tokens"] > 1000 for r in (cold, warm, plain_warm, plain_cold)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert (
        cold["token_ids"] == warm["token_ids"] == plain_warm["token_ids"] == plain_cold["token_ids"]
    )
