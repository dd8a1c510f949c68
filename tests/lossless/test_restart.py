"""A chat goes on after a restart where it was, with the tokens of a cold one, on every kind of layer."""

from __future__ import annotations

import pytest
from support import ORACLE, prompt_ids, serving

CONFIGS = {
    "plain": ("flow=plain", "drafter=none"),
    "wrong": ("flow=speculative", ORACLE, "+drafter.wrong_every=2", "depth.max=4"),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_five_turns_and_a_restart_between_any_two(family, config, tmp_path):
    common = (f"model.family={family}", *CONFIGS[config])
    disk = ("tier=[ram,disk]", f"tier.disk.path={tmp_path}", "tier.disk.reserve_gb=0")
    prompt, last, turns = prompt_ids(48), 0, []
    for turn in range(5):
        with serving(*common, *disk) as engine:
            got = engine.generate(prompt, max_tokens=12, ignore_eos=True)
            again = engine.generate(prompt, max_tokens=12, ignore_eos=True)
            report = engine.flush()
            engine.pipeline.parts["tier"][1].check_integrity()
        assert report["durable"], report
        assert got["token_ids"] == again["token_ids"]
        assert got["cached_tokens"] > last or turn == 0
        turns.append((list(prompt), got["token_ids"]))
        last, prompt = got["cached_tokens"], prompt + got["token_ids"] + prompt_ids(9, seed=turn)
    with serving(*common, "tier=none") as engine:
        for asked, answered in turns:
            cold = engine.generate(asked, max_tokens=12, ignore_eos=True)
            assert cold["token_ids"] == answered
            assert cold["cached_tokens"] == 0


def test_a_flush_without_a_disk_is_not_durable():
    with serving("tier=ram") as engine:
        engine.generate(prompt_ids(20), max_tokens=2)
        assert engine.flush()["durable"] is False
