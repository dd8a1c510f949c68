"""Drafters with weights of their own: a warm start goes on with what they knew, a depth cuts by it."""

from __future__ import annotations

import pytest
from support import prompt_ids, serving
from tiny_drafters import KINDS, TINY, tiny_checkpoint

PROMPT, LENGTH = prompt_ids(31, seed=31), 12


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in TINY])
def test_a_warm_start_goes_on_with_the_drafters_state(kind, tmp_path):
    """The next turn finds the drafter's own state beside the target's."""
    chosen = tiny_checkpoint(kind, tmp_path)
    with serving("flow=speculative", "depth.max=3", "tier=ram", *chosen) as engine:
        first = engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True)
        chat = PROMPT + first["token_ids"]
        warm = engine.generate(chat, max_tokens=LENGTH, ignore_eos=True)
        assert warm["cached_tokens"] >= len(chat) - 2
    with serving("flow=plain", "drafter=none", "tier=none", chosen[0]) as engine:
        cold = engine.generate(chat, max_tokens=LENGTH, ignore_eos=True)
    assert warm["token_ids"] == cold["token_ids"]


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_confidence_cuts_their_proposals(kind, tmp_path):
    """Drafts nobody is sure of are not verified; the tokens stay what they are."""
    answers = []
    for least in (0.0, 1.0):
        chosen = (*tiny_checkpoint(kind, tmp_path), "depth=confidence", f"depth.min_p={least}")
        with serving("flow=speculative", "tier=none", *chosen) as engine:
            answers.append(engine.generate(PROMPT, max_tokens=LENGTH, ignore_eos=True))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["speculation"]["drafted"] > 0 == answers[1]["speculation"]["drafted"]
