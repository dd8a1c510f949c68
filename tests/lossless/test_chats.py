"""A chat of five turns on layers that cannot be cut: each turn reuses more, across a restart too."""

from __future__ import annotations

import pytest
from support import serving

from pipeline.lab import texts

SAID = ["Say hello.", "And again?", "What is a mill?", "Where does it stand?", "Thank you."]
TURNS = (  # of Gemma 3; its GGUF package brings no template
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHATS = {
    "gemma3_270m": (("model=gemma3_270m",), texts.prose(3, 26), 4),
    "hybrid": (("model.family=qwen3_5",), "The mill stands by the river. " * 6, 12),
    "windows": (("model.family=gemma3",), "The mill stands by the river. " * 6, 12),
}


def reply(engine, messages, tokens):
    return engine.generate(messages, max_tokens=tokens, temperature=0.0, ignore_eos=True)


def same_as_cold(engine, turns, tokens):
    """Memory forgets, and what is on disk is not asked for."""
    disk = engine.pipeline.parts["tier"][1]
    disk.usable = lambda *what: 0
    for asked, answered in turns:
        engine.exclusive(engine.pipeline.parts["tier"][0].clear)
        cold = reply(engine, asked, tokens)
        assert cold["token_ids"] == answered["token_ids"]
        assert cold["cached_tokens"] == 0


@pytest.mark.parametrize(
    "chat", [pytest.param(n, marks=[pytest.mark.real] * (n == "gemma3_270m")) for n in CHATS]
)
def test_every_turn_reuses_more_before_and_after_a_restart(chat, tmp_path):
    settings, opening, tokens = CHATS[chat]
    if chat == "gemma3_270m":
        (tmp_path / "turns.jinja").write_text(TURNS)
        settings = (*settings, f"model.template={tmp_path / 'turns.jinja'}")
    disk = ("tier=[ram,disk]", f"tier.disk.path={tmp_path / 'states'}", "tier.disk.reserve_gb=0")
    messages = [{"role": "system", "content": opening}]
    turns: list[tuple[list, dict]] = []
    for lines in (SAID[:3], SAID[3:]):
        with serving(*settings, "drafter=none", *disk) as engine:
            for line in lines:
                messages = [*messages, {"role": "user", "content": line}]
                answer = reply(engine, messages, tokens)
                turns.append((messages, answer))
                messages = [*messages, {"role": "assistant", "content": answer["text"]}]
            assert engine.flush()["durable"]
            same_as_cold(engine, turns[-len(lines) :], tokens)
    cached = [answer["cached_tokens"] for _, answer in turns]
    assert cached[0] == 0 and cached == sorted(set(cached)), cached
