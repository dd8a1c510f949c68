"""Trained pairs: a drafter whose forward or convention is wrong anywhere accepts next to nothing."""

from __future__ import annotations

import pytest
from support import serving, together
from train_pairs import LENGTH, PAIRS, text

TARGETS = {
    "eagle3": "qwen3",
    "dspark": "qwen3",
    "nextn": "glm4_moe",
    "assistant": "gemma4",
    "mtp": "qwen3_5",
}
STARTS = [(0, 3), (1, 40), (2, 9), (3, 17), (2, 51), (0, 60)]  # mode, letter
HEAD = 4


@pytest.mark.parametrize("kind", sorted(TARGETS))
def test_most_drafts_of_a_trained_pair_are_accepted(kind):
    model = ("model=local", f"model.path={PAIRS / f'target_{TARGETS[kind]}'}", "tier=none")
    ours = (f"drafter={kind}", f"drafter.path={PAIRS / kind}", "depth.max=3", "flow=speculative")
    texts = [text(mode, letter, LENGTH) for mode, letter in STARTS]
    with serving(*model, *ours, "sampler=greedy", recipe="local") as engine:
        prompts = [ids[:HEAD] for ids in texts]
        results = together(engine, prompts, max_tokens=LENGTH - HEAD, ignore_eos=True)
    assert [r["token_ids"] for r in results] == [ids[HEAD:] for ids in texts], "the target learned"
    drafted = sum(r["speculation"]["drafted"] for r in results)
    accepted = sum(r["speculation"]["accepted"] for r in results)
    assert drafted > 60
    assert accepted / drafted > 0.6, (accepted, drafted)


def test_the_pairs_are_small():
    for folder in [PAIRS / name for name in TARGETS]:
        assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000, folder
