"""Many sessions, little memory, a slow disk: each goes on where it was, with the tokens of a cold one."""

from __future__ import annotations

import random
import time

import pytest
from support import prompt_ids, serving, together

from stages.tiers.saved import format as form

SESSIONS = 20
TURNS = 3


def disk(tmp_path, *more: str) -> tuple[str, ...]:
    place = (f"tier.disk.path={tmp_path}", "tier.disk.reserve_gb=0", "tier.disk.segment_tokens=16")
    return ("tier=[ram,disk]", *place, "stage.spill.debounce_s=0", *more)


def code_word(session: int) -> list[int]:
    """So that an answer from another's state is another answer."""
    return [40 + session, 41 + session, 42 + session] * 3


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_twenty_sessions_with_memory_for_two_and_a_slow_writer(family, tmp_path, monkeypatch):
    write = form.write
    monkeypatch.setattr(form, "write", lambda *what: time.sleep(0.002) or write(*what))
    model, rng = f"model.family={family}", random.Random(3)
    with serving(model, "tier=none") as engine:
        size = engine.exclusive(
            lambda: engine.pipeline.parts["kv"].bytes_per_token(engine.pipeline.parts["model"])
        )
    two = f"tier.ram.max_gb={2 * size * 120 / 1e9}"
    prompts = {n: prompt_ids(24) + code_word(n) for n in range(SESSIONS)}
    asked: list[tuple[list[int], list[int]]] = []
    cached = 0
    with serving(model, *disk(tmp_path, two), "tier.ram.entry_bytes=0") as engine:
        for turn in range(TURNS):
            order = rng.sample(range(SESSIONS), SESSIONS)
            for group in (order[:7], order[7:14], order[14:]):
                wanted = [list(prompts[n]) for n in group]
                answers = together(engine, wanted, max_tokens=6, ignore_eos=True)
                for n, prompt, answer in zip(group, wanted, answers, strict=True):
                    asked.append((prompt, answer["token_ids"]))
                    cached += answer["cached_tokens"] if turn else 0
                    prompts[n] = prompt + answer["token_ids"] + code_word(n)
                time.sleep(0.02)
        assert engine.flush()["pending"] == 0
        for tier in engine.pipeline.parts["tier"]:
            engine.exclusive(tier.check_integrity)
        assert engine.stats()["tiers"]["ram"]["evictions"] > SESSIONS
        assert engine.stats()["tiers"]["disk"]["hits"] > 0
    assert cached > SESSIONS * 20, "sessions that left memory came back from disk"
    with serving(model, "tier=none") as engine:
        for prompt, answered in asked:
            assert engine.generate(prompt, max_tokens=6, ignore_eos=True)["token_ids"] == answered


def test_a_session_is_kept_when_others_go_and_served_without_a_search():
    with serving("tier=ram", "tier.ram.max_gb=0.0004", "tier.ram.entry_bytes=0") as engine:
        first = engine.generate(prompt_ids(60), max_tokens=4, session_id="mine", ignore_eos=True)
        for seed in range(1, 40):
            engine.generate(prompt_ids(60, seed=seed), max_tokens=4, ignore_eos=True)
        grown = prompt_ids(60) + first["token_ids"] + prompt_ids(5, seed=9)
        again = engine.generate(grown, max_tokens=4, session_id="mine", ignore_eos=True)
        stats = engine.stats()["tiers"]["ram"]
        assert again["cached_tokens"] == 63, "all that was said, but the last token's own"
        assert (stats["session_hits"], stats["sessions"]) == (1, 1)
        assert stats["evictions"] > 20
        engine.close_session("mine")
        for seed in range(50, 90):
            engine.generate(prompt_ids(60, seed=seed), max_tokens=4, ignore_eos=True)
        gone = engine.generate(grown, max_tokens=4, session_id="mine", ignore_eos=True)
        assert gone["cached_tokens"] < 20, "closed, it was like others"
        assert gone["token_ids"] == again["token_ids"]
        assert engine.stats()["tiers"]["ram"]["sessions"] == 1


def test_a_session_that_is_edited_is_served_like_any_other():
    """The id is affinity: another history, another namespace or nobody's state is no refusal."""
    with serving("tier=ram") as engine, serving("tier=none") as cold:
        for prompt in (prompt_ids(60), prompt_ids(40) + prompt_ids(20, seed=4), prompt_ids(30)):
            got = engine.generate(prompt, max_tokens=6, session_id="s", ignore_eos=True)
            assert (
                got["token_ids"]
                == cold.generate(prompt, max_tokens=6, ignore_eos=True)["token_ids"]
            )
