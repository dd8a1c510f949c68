"""`token_origins: true`: where each token came from, whole and streamed, on the real engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

import pipeline
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 1}


@pytest.fixture(scope="module")
def real():
    """Drafts are random bytes: nearly always wrong."""
    overrides = ("drafter=random", "depth.max=3", "constraint=llguidance", "model.layers=1")
    with (
        pipeline.load("fake", *overrides) as engine,
        serve_in_thread(engine, ServerSettings(shutdown_s=1)) as base,
    ):
        yield engine, base


@pytest.fixture
def raw(real, script):
    return script.Raw(real[1])


def whole(raw, **more):
    status, _, reply = raw.post("/v1/chat/completions", {**ASK, "token_origins": True, **more})
    assert status == 200, reply
    return reply["choices"][0]


def streamed(raw, path="/v1/chat/completions", **more):
    ask = {**ASK, "token_origins": True, "stream": True, **more}
    data = [line[6:] for line in raw.events(path, ask) if line.startswith("data: {")]
    return [json.loads(chunk)["choices"][0] for chunk in data]


def tokens(chunks):
    return [t for c in chunks for t in (c.get("headrace") or {}).get("tokens", ())]


def test_each_token_has_its_origin_and_the_texts_join_to_the_answer(raw):
    choice = whole(raw)
    told = choice["headrace"]["tokens"]
    assert len(told) == 60
    assert "".join(one["text"] for one in told) == choice["message"]["content"]
    assert all(bool(one.get("rejected")) == (one["origin"] == "correction") for one in told)
    speculation = choice["headrace"]["speculation"]
    kinds = [one["origin"] for one in told]
    assert kinds.count("accepted") == speculation["accepted"]
    rejected = sum(len(one.get("rejected", ())) for one in told)
    assert rejected + kinds.count("accepted") == speculation["drafted"] > 50
    assert not any(one.get("constrained") for one in told)


def test_streams_say_the_same(raw):
    chunks = streamed(raw)
    assert tokens(chunks) == whole(raw)["headrace"]["tokens"]
    assert "seed" in chunks[-1]["headrace"] and "tokens" not in chunks[-1]["headrace"]


def test_asking_changes_no_token_and_not_asking_says_nothing(raw):
    plain = whole(raw, token_origins=None)
    assert plain["message"] == whole(raw)["message"]
    assert "tokens" not in plain["headrace"]
    assert not tokens(streamed(raw, token_origins=False))


def test_what_the_form_overruled_is_said(raw):
    told = whole(raw, guided_regex="[0-9]{20}")["headrace"]["tokens"]
    assert len(told) == 20 and sum(bool(one.get("constrained")) for one in told) > 10


def test_completions_have_them_too_and_a_stop_string_is_in_them(raw):
    text = "".join(c["text"] for c in streamed(raw, "/v1/completions", prompt="ab"))
    chunks = streamed(raw, "/v1/completions", prompt="ab", stop=text[20:22])
    assert "".join(c["text"] for c in chunks) == text[:20]
    assert "".join(one["text"] for one in tokens(chunks)) == text[:22]


def test_from_python(real):
    found = real[0].generate("hi", max_tokens=30, seed=1, origins=True)
    assert len(found["origins"]) == 30
    assert {one["kind"] for one in found["origins"]} <= {"accepted", "correction", "bonus", "plain"}


def test_a_right_draft_is_followed_by_a_bonus():
    """The answer walks through a cycle of letters, which is known after one round."""
    with pipeline.load("fake", "depth.max=4") as engine:
        found = engine.generate("hi", max_tokens=150, origins=True)
    kinds = [one["kind"] for one in found["origins"]]
    assert "correction" not in kinds
    at = kinds.index("accepted")
    assert set(kinds[:at]) == {"plain"}
    assert {kinds[i - 1] for i, kind in enumerate(kinds) if kind == "bonus"} == {"accepted"}
