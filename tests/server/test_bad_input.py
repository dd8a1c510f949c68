"""Nothing a client sends gets anything but a clear refusal, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.errors import RequestError
from pipeline.server.body import parse_object
from pipeline.types import Accepted, Failed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTS = ("max_tokens", "top_k", "seed", "n", "prefill_chunk")
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e309", '"0.5"', "true", "[]", "{}")
BAD_NUMBERS = [
    *((name, text) for name in (*FLOATS, *INTS, "top_logprobs") for text in NOT_NUMBERS),
    *((name, "1" + "0" * 30) for name in (*FLOATS, *INTS, "top_logprobs")),
    *((name, "3.7") for name in (*INTS, "top_logprobs")),
    *((name, "-1") for name in (*INTS, "temperature", "top_p", "min_p", "repetition_penalty")),
    ("presence_penalty", "-2.1"),
    ("frequency_penalty", "2.1"),
    ("temperature", "2.1"),
    ("top_p", "0"),
    ("top_p", "1.1"),
    ("min_p", "1.1"),
    ("repetition_penalty", "0"),
    ("repetition_penalty", "1e-300"),
    ("repetition_penalty", "101"),
    ("top_logprobs", "21"),
    ("n", "0"),
    ("n", "9"),
    ("prefill_chunk", "0"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [*HI, {"role": "user", "content": "x", "name": 1}]}, "messages[1].name"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [3]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": {}}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": [], "stream": True}, "stream_options"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"100": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"),
    ({"model": 3}, "model"),
    ({"user": 3}, "user"),
    ({"session_id": 3}, "session_id"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"repetition_context_size": 20}, "repetition_context_size"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"top_a": 0.1}, "top_a"),
    ({"typical_p": 0.9}, "typical_p"),
    ({"mirostat": 2}, "mirostat"),
    ({"adapters": "x"}, "adapters"),
    *(({"adapter": name}, "adapter") for name in ("../x", "a+a", "a+none", "-", [1], 3, "a" * 65)),
    ({"draft_model": "x"}, "draft_model"),
    ({"enable_thinking": False}, "enable_thinking"),
    ({"n_predict": 5}, "n_predict"),
]
BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    *(({"prompt": prompt}, "prompt") for prompt in (None, "", [], [""], ["a", ""], [[]], 3, {})),
    *(
        ({"prompt": prompt}, "prompt")
        for prompt in ([1, "a"], [True], [1.0], [-1], [100], [[1], "a"])
    ),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "logprobs": 6}, "logprobs"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True, "n": 2}, "echo"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 3}, "n"),
]
NEUTRAL: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": None, "tool_choice": None, "response_format": {"type": "text"}, "n": 1},
    {"best_of": 1, "echo": False, "suffix": None, "logit_bias": {}, "store": True},
    {"top_a": 0, "typical_p": 1.0, "mirostat": 0, "mirostat_tau": 5, "repeat_penalty": 1.0},
    {"adapters": None, "adapter": None, "enable_thinking": None, "logits_processors": []},
    {"prediction": {"type": "content", "content": "x"}, "draft_model": "default_model"},
    {"metadata": {"a": 1}, "service_tier": "auto", "xtc_probability": 0.0, "stream_options": None},
]


def refused(raw: Any, path: str, body: Any, param: str | None) -> dict[str, Any]:
    status, headers, reply = raw.post(path, body)
    assert status == 400, reply
    assert headers["content-type"] == "application/json"
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    assert reply["error"]["param"] == param
    assert reply["error"]["type"] == "invalid_request_error"
    if param is not None:
        assert param in reply["error"]["message"]
    return reply["error"]


@pytest.fixture(autouse=True)
def goes_on(engine: Any, raw: Any) -> Any:
    """The engine sees no refused request, and the next good one works."""
    yield
    seen = len(engine.requests)
    assert raw.post(CHAT, {"messages": HI})[0] == 200
    assert len(engine.requests) == seen + 1


@pytest.mark.parametrize(("name", "number"), BAD_NUMBERS)
def test_numbers(engine, raw, name, number):
    body = json.dumps({"messages": HI, "logprobs": True})[:-1] + f', "{name}": {number}}}'
    refused(raw, CHAT, body.encode(), name)
    assert not engine.requests


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("ceiling", [2**31, 2**63 - 1])
def test_a_ceiling_is_never_too_high(engine, raw, name, ceiling):
    assert raw.post(CHAT, {"messages": HI, name: ceiling})[0] == 200
    assert engine.requests[0].max_tokens == ceiling
    refused(raw, CHAT, {"messages": HI, name: 2**63}, name)


def test_choices_that_would_never_find_room(engine, raw):
    """With 429 the client would come back for ever."""
    engine.target_info["max_open"] = 3
    try:
        error = refused(raw, CHAT, {"messages": HI, "n": 4}, "n")
        refused(raw, TEXT, {"prompt": ["a"] * 4}, "prompt")
    finally:
        engine.target_info["max_open"] = 1000
    assert "more than 3 choices" in error["message"]
    assert "limits.max_queue" in error["message"]


@pytest.mark.parametrize("name", [*FLOATS, *INTS, "top_logprobs", "stop", "stream", "logit_bias"])
def test_null_is_the_default(engine, raw, name):
    assert raw.post(CHAT, {"messages": HI, name: None})[0] == 200


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS)
def test_chats(engine, raw, fields, param):
    refused(raw, CHAT, {"messages": HI, **fields}, param)
    assert not engine.requests


@pytest.mark.parametrize(("fields", "param"), BAD_TEXTS)
def test_texts(engine, raw, fields, param):
    refused(raw, TEXT, fields, param)
    assert not engine.requests


@pytest.mark.parametrize("fields", NEUTRAL)
def test_neutral_values_are_accepted_in_silence(engine, raw, fields):
    status, headers, reply = raw.post(CHAT, {"messages": HI, **fields})
    assert status == 200, reply
    assert "warning" not in headers


def test_unknown_names_are_listed(engine, raw):
    odd = {"frobnicate": 1, "Ünï\r\nx": 2, "z\ud800": 3}
    status, headers, _ = raw.post(CHAT, {"messages": [{**HI[0], "mood": "good"}], **odd})
    assert status == 200
    expected = "frobnicate, %C3%9Cn%C3%AF%0D%0Ax, z%EF%BF%BD, messages[0].mood"
    assert headers["warning"] == f'299 headrace "ignored: {expected}"'
    stream = {"stream": True, "stream_options": {"speed": 2}}
    body = json.dumps({"messages": HI, **stream}).encode()
    assert "stream_options.speed" in raw.call("POST", CHAT, body)[1]["warning"]
    _, headers, _ = raw.post(CHAT, {"messages": HI, **{f"x{i}": i for i in range(30)}})
    assert headers["warning"].endswith('x19 and 10 more"')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b'{"messages": [',
        b"{'a': 1}",
        b'{"a": 1} x',
        b'\xff\xfe{"a"',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"a": ' + b"1" * 4000 + b".",
        b'{"a": +1}',
        b'{"messages": [{"role": "user", "content": "hi"}], "x": ' + b"[" * 100 + b"]" * 100 + b"}",
        b"\x00" * 8,
    ],
)
def test_bodies(engine, raw, body):
    assert refused(raw, CHAT, body, None)["code"] == "invalid_json"


def test_deep_nesting_and_long_numbers():
    for body in (b"[" * 200_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": -' + b"[" * 100_000):
        with pytest.raises(RequestError):
            parse_object(body)


def test_not_finite_anywhere_is_named(engine, raw):
    refused(raw, CHAT, b'{"messages": [{"role": "user", "content": NaN}]}', "messages[0].content")
    refused(raw, CHAT, b'{"messages": [], "metadata": {"a": [1, -1e999]}}', "metadata.a[1]")


def test_half_surrogates_become_replacement_marks(engine, raw):
    text = r"a\ud800b\udc00\u0000\u2028\ufeffc\ud83d\ude00"
    body = f'{{"messages": [{{"role": "user", "content": "{text}"}}], "stop": "{text}",'
    body += f'"user": "{text}", "model": "{text}", "chat_template_kwargs": {{"{text}": "{text}"}}}}'
    assert raw.post(CHAT, body.encode())[0] == 200
    clean = "a\ufffdb\ufffd\0\u2028\ufeffc\N{GRINNING FACE}"
    (request,) = engine.requests
    assert request.messages[0]["content"] == clean
    assert (request.stop, request.client, request.template_args) == (
        (clean,),
        clean,
        {clean: clean},
    )
    refused(raw, CHAT, b'{"messages": [{"role": "\\ud800", "content": ""}]}', "messages[0].role")


@pytest.mark.parametrize("inside", [r'"\ud800"', "NaN", "[" * 500 + "]" * 500])
def test_a_call_s_arguments_are_as_clean_as_the_body_they_came_in(engine, raw, inside):
    call = {
        "id": "x",
        "type": "function",
        "function": {"name": "f", "arguments": f'{{"a": {inside}}}'},
    }
    assert (
        raw.post(CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]})[0]
        == 200
    )
    (known,) = engine.requests[-1].messages[1]["tool_calls"]
    text = call["function"]["arguments"]  # what is no JSON of ours stays text
    assert known["function"]["arguments"] == ({"a": "\ufffd"} if "ud800" in inside else text)


def test_content_type_does_not_matter(engine, raw):
    body = json.dumps({"messages": HI}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"):
        assert raw.call("POST", CHAT, body, **{"content-type": kind})[0] == 200
    assert raw.call("POST", CHAT, b"\xef\xbb\xbf" + body)[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large(engine, raw, chunked):
    body: Any = b'{"messages": "' + b"x" * 9000 + b'"}'
    status, _, reply = raw.call("POST", CHAT, iter([body[:5000], body[5000:]]) if chunked else body)
    assert status == 413
    assert json.loads(reply)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", TEXT, 405),
        ("POST", "/health", 405),
        ("GET", "/nope", 404),
        ("POST", "/", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/health/", 404),
        ("GET", "/%ff%00", 404),
    ],
)
def test_wrong_addresses(engine, raw, method, path, status):
    got, headers, body = raw.call(method, path)
    assert got == status
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in headers) == (status == 405)
    assert ("/v1" in json.loads(body)["error"]["message"]) == (status == 404), "says what to type"


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine(engine, raw, script, stream):
    too_long = RequestError("65 of 64", param="messages", code="context_length_exceeded")
    engine.plan = lambda _: [0.01, Failed(too_long)]
    status, _, reply = raw.post(CHAT, {"messages": HI, "stream": stream})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    engine.room = 0
    status, headers, reply = raw.post(CHAT, {"messages": HI, "stream": stream})
    assert (status, headers["retry-after"], reply["error"]["code"]) == (429, "3", "queue_full")
    engine.state = "closed"
    status, headers, reply = raw.post(CHAT, {"messages": HI, "stream": stream})
    assert (status, reply["error"]["code"]) == (503, "engine_closed")
    engine.state, engine.room = "open", 1000
    engine.plan = lambda _: [Failed(RuntimeError("secret"))]
    status, _, reply = raw.post(CHAT, {"messages": HI, "stream": stream})
    assert (status, reply["error"]["type"]) == (500, "server_error")
    assert "secret" not in str(reply)
    assert b'path="/v1/chat/completions",status="500"' in raw.call("GET", "/metrics")[2]
    engine.plan = script.greeting


def test_a_refused_choice_cancels_the_others(engine, raw, script):
    engine.room, engine.plan = 2, lambda _: [Accepted(1), 30.0]
    assert raw.post(CHAT, {"messages": HI, "n": 3})[0] == 429
    script.eventually(lambda: engine.active == 0)
    engine.room, engine.plan = 1000, script.greeting
