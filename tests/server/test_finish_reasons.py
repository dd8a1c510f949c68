"""How an answer ended, told the same way streamed or whole, alone or batched, drafted or not; and
parts that fail, which cost speed and no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import pipeline
from pipeline.engine import Engine
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from stages.drafters.history import HistoryRows

CHAT = "/v1/chat/completions"
# 'a' is followed by EOS; the answer does not depend on the prompt but for its last letter
MODEL = ("model.eos_every=97", "model.delay_ms=2", "limits.max_rows=4")
DRAFTERS = {"drafted": (), "plain": ("drafter=none", "flow=plain")}
Served = tuple[Engine, Any]


@pytest.fixture(scope="module", params=DRAFTERS)
def served(request: Any, script: Any) -> Iterator[Served]:
    with (
        pipeline.load("fake", *MODEL, *DRAFTERS[request.param]) as engine,
        serve_in_thread(engine, ServerSettings()) as base,
    ):
        fail_when_asked(engine)
        yield engine, script.Raw(base)


@pytest.fixture(scope="module")
def answer(served: Served) -> str:
    return whole(served[1], {"messages": said("hi")})["text"]


def fail_when_asked(engine: Engine) -> None:
    """A fault in every round with a row of session "boom" that has given some tokens."""
    stage = engine.pipeline.stages["accept"]
    run = stage.run

    def faulty(batch: Any) -> None:
        asked = [s for s in batch.sequences if s.request.session_id == "boom"]
        if any(len(s.output_ids) >= 3 for s in asked):
            raise RuntimeError("a fault of one row")
        run(batch)

    stage.run = faulty  # type: ignore[method-assign]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def whole(raw: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, _, reply = raw.post(CHAT, body)
    if status != 200:
        return {"reason": None, "error": reply["error"]["code"]}
    choice = reply["choices"][0]
    drafted = choice["headrace"]["speculation"]["drafted"]
    text = choice["message"]["content"]
    return {"reason": choice["finish_reason"], "text": text, "drafted": drafted}


def streamed(raw: Any, body: dict[str, Any]) -> dict[str, Any]:
    lines = [line for line in raw.events(CHAT, {**body, "stream": True}) if line[0] != ":"]
    complete = lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[: -1 if complete else None]]
    if not complete:
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        return {"reason": None, "error": chunks[-1]["error"]["code"]}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    drafted = choices[-1]["headrace"]["speculation"]["drafted"]
    return {"reason": choices[-1]["finish_reason"], "text": text, "drafted": drafted}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("ask", [whole, streamed])
def test_how_answers_end(served, answer, ask, together):
    engine, raw = served
    prompt = {"messages": said(answer * 2)}  # what a drafter can copy from
    bodies = [
        prompt,
        {**prompt, "stop": answer[11:13]},
        {**prompt, "max_tokens": 7},
        {**prompt, "session_id": "boom"},
    ]
    with ThreadPoolExecutor(4 if together else 1) as pool:
        got = list(pool.map(partial(ask, raw), bodies))
    assert [each["reason"] for each in got] == ["stop", "stop", "length", None]
    assert [each.get("text") for each in got] == [answer, answer[:11], answer[:7], None]
    assert got[3]["error"] == "internal_error"
    assert (got[0]["drafted"] > 0) == ("draft" in engine.pipeline.stages)


@pytest.mark.parametrize("part", ["tier.lookup", "tier.put", "rows.draft", "rows.commit"])
@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_part_that_fails_costs_no_answer(served, answer, monkeypatch, ask, part):
    engine, raw = served
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(part)
        raise RuntimeError("a part's own fault")

    owner, method = part.split(".")
    owners = {"tier": engine.pipeline.parts["tier"][0], "rows": HistoryRows}
    monkeypatch.setattr(owners[owner], method, fail)
    body = {"messages": said(answer * 2 + part)}
    for _ in range(2):
        got = ask(raw, body)
        assert got["reason"] == "stop"
        assert got["text"] == answer
    drafting = "draft" in engine.pipeline.stages
    assert bool(calls) == (owner == "tier" or drafting)
