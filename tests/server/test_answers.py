"""The official client gets whole and streamed answers in OpenAI's shape."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

TEXT = "Hello wör\N{WAVING HAND SIGN}\u2028\0end"
ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


def test_chat_whole(engine, client):
    reply = client.chat.completions.create(**ASK)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        TEXT,
        "stop",
    )
    assert reply.object == "chat.completion"
    assert reply.model == "fake/one"
    assert reply.id.startswith("chatcmpl-")
    assert reply._request_id == reply.id
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert choice.headrace["speculation"]["drafted_by_position"] == [2, 1]
    assert choice.headrace["seed"] == 7


def test_chat_request_reaches_the_engine(engine, client):
    client.chat.completions.create(
        model="m",
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "tool_calls": [], "content": "c", "name": "n"},
        ],
        max_tokens=9,
        max_completion_tokens=4,
        stop="END",
        seed=3,
        temperature=0,
        top_p=0.5,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"7": -100},
        user="bob",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "session_id": "s",
            "prefill_chunk": 64,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    (request,) = engine.requests
    assert [m["content"] for m in request.messages] == ["be brief", "ab", "c"]
    assert [m["role"] for m in request.messages] == ["system", "user", "assistant"]
    assert request.messages[2]["name"] == "n"
    assert (request.max_tokens, request.stop, request.client) == (4, ("END",), "bob")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0,
        0.5,
        5,
        0.1,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, -1)
    assert (sampling.frequency_penalty, sampling.logit_bias, sampling.seed) == (
        1.5,
        ((7, -100.0),),
        3,
    )
    assert (request.ignore_eos, request.session_id, request.prefill_chunk) == (True, "s", 64)
    assert request.template_args == {"enable_thinking": False}


def test_what_is_not_said_stays_open(engine, client):
    client.chat.completions.create(**ASK, temperature=None, stop=None, extra_body={"top_k": None})
    (request,) = engine.requests
    assert request.sampling == type(request.sampling)()
    assert (request.max_tokens, request.stop, request.logprobs) == (None, (), None)
    assert request.client == "127.0.0.1"


@pytest.mark.parametrize("limit", [0, 1, 3, 8, 20])
@pytest.mark.parametrize("stream", [False, True])
def test_finish_reason_is_the_same_in_both_forms(engine, client, limit, stream):
    expected = "length" if limit < 8 else "stop"
    if not stream:
        choice = client.chat.completions.create(**ASK, max_tokens=limit).choices[0]
        assert choice.finish_reason == expected
        return
    chunks = list(client.chat.completions.create(**ASK, max_tokens=limit, stream=True))
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [expected]


def test_chat_stream(engine, client):
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].choices[0].headrace["timings"] == {"ttft": 0.1}
    assert chunks[-1].choices[0].delta.role is None


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("chat", [True, False])
def test_usage_chunk_only_when_asked_for(engine, raw, options, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = ASK if chat else {"prompt": "hi"}
    lines = raw.events(path, {**ask, "stream": True, "stream_options": options})
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    wanted = bool(options and options.get("include_usage"))
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [wanted]
    if wanted:
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        whole = raw.post(path, ask)[2]
        assert chunks[-1]["usage"] == whole["usage"]
    else:
        assert not any("usage" in chunk for chunk in chunks)


def test_text_completions(engine, client):
    reply = client.completions.create(model="m", prompt="once", max_tokens=2)
    assert (reply.object, reply.choices[0].text, reply.choices[0].finish_reason) == (
        "text_completion",
        "Hello ",
        "length",
    )
    chunks = list(client.completions.create(model="m", prompt=[4, 5], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert engine.requests[0].text == "once"
    assert engine.requests[1].token_ids == (4, 5)


def test_several_prompts_and_choices(engine, client):
    reply = client.completions.create(model="m", prompt=["a", "b"], n=2, seed=10, max_tokens=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    asked = sorted(engine.requests, key=lambda r: r.id)
    assert [(r.text, r.sampling.seed) for r in asked] == [
        ("a", 10),
        ("a", 11),
        ("b", 10),
        ("b", 11),
    ]
    assert len({r.id for r in asked}) == 4
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 8)
    assert usage.prompt_tokens_details.cached_tokens == 6


def test_choices_in_a_stream(engine, client):
    texts, ends = {}, []
    for chunk in client.chat.completions.create(**ASK, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        ends += [choice.index] * (choice.finish_reason == "stop")
    assert texts == dict.fromkeys(range(3), TEXT)
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stop", [None, [], "x", ["x"], ["a", "b", "c", "d", "e"]])
def test_stop_forms(engine, raw, stop):
    assert raw.post("/v1/chat/completions", {**ASK, "stop": stop})[0] == 200
    assert engine.requests[0].stop == tuple([stop] if isinstance(stop, str) else stop or ())


@pytest.mark.parametrize("top", [None, 0, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(engine, client, top, stream):
    ask = {**ASK, "logprobs": True, "top_logprobs": top}
    if stream:
        chunks = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True)]
        entries = [e for c in chunks if c.logprobs for e in c.logprobs.content]
    else:
        entries = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert len(entries) == 7  # usage.completion_tokens without the EOS
    assert b"".join(bytes(e.bytes) for e in entries).decode() == TEXT
    assert entries[0].token == "Hel"
    assert entries[0].logprob == -0.5
    assert [len(e.top_logprobs) for e in entries] == [top or 0] * 7


def test_no_logprobs_unless_asked_for(engine, client):
    assert client.chat.completions.create(**ASK).choices[0].logprobs is None
    assert client.chat.completions.create(**ASK, logprobs=False).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_text_logprobs(engine, client, stream):
    ask = {"model": "m", "prompt": "hi", "logprobs": 2}
    if stream:
        chunks = [c.choices[0].logprobs for c in client.completions.create(**ask, stream=True)]
        forms = [form for form in chunks if form is not None]
    else:
        forms = [client.completions.create(**ask).choices[0].logprobs]
    tokens = [token for form in forms for token in form.tokens]
    offsets = [offset for form in forms for offset in form.text_offset]
    best = [entry for form in forms for entry in form.top_logprobs]
    assert tokens == [
        "Hel",
        "lo ",
        "wör",
        "bytes:\\xf0\\x9f",
        "bytes:\\x91\\x8b",
        "\u2028",
        "\0end",
    ]
    assert offsets == [0, 3, 6, 9, 9, 10, 11]
    assert best[2] == {"Hel": -1.0, "lo ": -2.0, "wör": -0.5}


def test_infinite_logprobs_are_json(engine, raw, script):
    from pipeline.types import Accepted, Delta, TokenLogprob

    entry = TokenLogprob(1, float("-inf"), ((2, float("nan")),))
    engine.plan = lambda _: [Accepted(1), Delta("Hel", (1,), (entry,)), script.done("stop", 1)]
    reply = raw.post("/v1/chat/completions", {**ASK, "logprobs": True, "top_logprobs": 1})[2]
    (shown,) = reply["choices"][0]["logprobs"]["content"]
    assert (shown["logprob"], shown["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


def test_many_clients(engine, client):
    def ask(i: int) -> str:
        if i % 2:
            return client.chat.completions.create(**ASK).choices[0].message.content or ""
        chunks = client.chat.completions.create(**ASK, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(40))) == [TEXT] * 40


def test_models(engine, client, raw):
    model, sql, poet = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("fake/one", "model", "headrace")
    assert client.models.retrieve("fake/one").id == "fake/one"
    assert (sql.id, poet.id) == ("fake/one:sql", "fake/one:poet")
    assert client.models.retrieve("fake/one:sql").parent == "fake/one"
    assert model.adapters == ["sql", "poet"]
    status, _, body = raw.call("GET", "/v1/models/other")
    assert status == 404
    assert json.loads(body)["error"]["code"] == "model_not_found"


def test_status_endpoints(engine, raw):
    assert json.loads(raw.call("GET", "/health")[2])["device"] == {"blas": "none"}
    assert raw.call("GET", "/ready")[0] == 200
    engine.state = "draining"
    assert raw.call("GET", "/health")[0] == 200
    assert raw.call("GET", "/ready")[0] == 503
    engine.state = "failed"
    assert raw.call("GET", "/health")[0] == 503
    assert json.loads(raw.call("GET", "/stats")[2])["rows"]["active"] == 0
    status, headers, text = raw.call("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b'headrace_requests_total{path="/ready",status="503"} 1.0' in text
    assert b"headrace_engine_rows_active 0.0" in text
    assert b"headrace_time_to_first_token_seconds_bucket" in text


def test_an_echo_without_scores_is_shown_without_tokenizing_it(engine, client, monkeypatch):
    def encode(text, **more):
        raise AssertionError("the engine does that")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    assert client.completions.create(model="any", prompt="abc", echo=True).choices[0].text == (
        f"abc{TEXT}"
    )
