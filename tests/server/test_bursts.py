"""Work that takes long holds up its own kind only: bodies, tokenizing, stored answers, flushes, figures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.errors import RequestError
from pipeline.server import body, tokens
from pipeline.server.chat import ChatBody
from pipeline.server.run import serve_in_thread
from pipeline.server.schema import read
from pipeline.server.settings import ServerSettings
from pipeline.server.store import ResponseStore

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = {"messages": [{"role": "user", "content": "hi"}]}
LARGE = {"messages": [{"role": "user", "content": "hi" * body.SMALL}]}
BURST = 12
STORED = {"response", "stored", "items", "follow"}


@pytest.fixture
def place(script, tmp_path):
    engine, path = script.Engine(), str(tmp_path / "socket")
    with serve_in_thread(engine, ServerSettings(socket=path, shutdown_s=1)) as base:
        yield engine, script.Raw(base), script.Raw(path=path)


@contextlib.contextmanager
def held(owner, name, monkeypatch):
    """Calls of this wait until the end; gives those that have begun."""
    begun, go, work = [], threading.Event(), getattr(owner, name)

    def wait(*args, **kwargs):
        begun.append(args)
        assert go.wait(10)
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, wait)
    try:
        yield begun
    finally:
        go.set()


def requests(place):
    """One of each kind, by name."""
    _, raw, local = place
    name = raw.post(RESPONSES, {"input": "hi"})[2]["id"]
    follow = {"input": "hi", "previous_response_id": name, "store": False}
    return {
        "health": lambda: raw.call("GET", "/health")[0],
        "stats": lambda: raw.call("GET", "/stats")[0],
        "metrics": lambda: raw.call("GET", "/metrics")[0],
        "chat": lambda: raw.post(CHAT, HI)[0],
        "large": lambda: raw.post(CHAT, LARGE)[0],
        "tokenize": lambda: raw.post("/tokenize", {"prompt": "hi"})[0],
        "detokenize": lambda: raw.post("/detokenize", {"tokens": [1]})[0],
        "response": lambda: raw.post(RESPONSES, {"input": "hi"})[0],
        "stored": lambda: raw.call("GET", f"{RESPONSES}/{name}")[0],
        "items": lambda: raw.call("GET", f"{RESPONSES}/{name}/input_items")[0],
        "follow": lambda: raw.post(RESPONSES, follow)[0],
        "flush": lambda: local.call("POST", "/admin/cache/flush")[0],
        "adapters": lambda: local.call("GET", "/admin/adapters")[0],
    }


@pytest.mark.parametrize(
    ("kind", "owner", "name", "also"),
    [
        ("large", lambda engine: body, "_values", set()),
        ("tokenize", lambda engine: engine.tokenizer, "encode", {"detokenize"}),
        ("stored", lambda engine: ResponseStore, "get", STORED),
        ("response", lambda engine: ResponseStore, "put", STORED),
        ("flush", lambda engine: engine, "flush", set()),
        ("stats", lambda engine: engine, "stats", {"metrics"}),
    ],
)
def test_a_burst_of_one_kind(place, script, monkeypatch, kind, owner, name, also):
    engine = place[0]
    engine.adapters = script.types.SimpleNamespace(listed=lambda: [])
    ask = requests(place)
    with ThreadPoolExecutor(BURST) as pool:
        with held(owner(engine), name, monkeypatch) as begun:
            burst = [pool.submit(ask[kind]) for _ in range(BURST)]
            script.eventually(lambda: begun)
            began = time.monotonic()
            others = ask.keys() - also - {kind}
            assert {other: ask[other]() for other in others} == dict.fromkeys(others, 200)
            assert time.monotonic() - began < 5
        assert {each.result() for each in burst} == {200}


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b"1," * 300_000 + b"1]",
        b"[" + b"{}," * 30_000 + b"1]",
        b"{" + b'"a":1,' * 150_000 + b'"a":1}',
        b'["\\\\",' + b'"\\"",' * 300_000 + b"1]",
    ],
    ids=["values", "objects", "names", "strings"],
)
def test_bodies_of_too_many_values(place, value):
    status, _, reply = place[1].post(CHAT, b'{"messages": ' + value + b"}")
    assert (status, reply["error"]["code"]) == (400, "body_too_complex")
    assert "262144" in reply["error"]["message"]


def test_arguments_of_all_calls_share_the_bounds(place):
    """Each of them is small enough to be read, and each is JSON in a string."""
    function = {"name": "f", "arguments": '{"a":[' + "[]," * 1000 + "1]}"}
    calls = [{"id": f"c{i}", "type": "function", "function": function} for i in range(30)]
    said = {"role": "assistant", "tool_calls": calls}
    items = [{"type": "function_call", "call_id": "c", **function}] * 30
    for path, asked in ((CHAT, {"messages": [said]}), (RESPONSES, {"input": items})):
        status, _, reply = place[1].post(path, asked)
        assert (status, reply["error"]["code"]) == (400, "body_too_complex")
        assert reply["error"]["message"].startswith("arguments: ")
    assert place[1].post(CHAT, {"messages": [{**said, "tool_calls": calls[:10]}]})[0] == 200


def test_a_chat_that_goes_on_has_the_bounds_of_one(place):
    item = {"type": "function_call", "call_id": "c", "name": "f"}
    item["arguments"] = '{"a":[' + "1," * 150_000 + "1]}"
    first = place[1].post(RESPONSES, {"input": [item]})[2]
    follow = {"previous_response_id": first["id"]}
    assert place[1].post(RESPONSES, {"input": "hi", **follow})[0] == 200
    status, _, reply = place[1].post(RESPONSES, {"input": [item], **follow})
    assert (status, reply["error"]["code"]) == (400, "body_too_complex")
    assert reply["error"]["param"] == "previous_response_id"


def test_a_thread_that_goes_on_has_the_bounds_of_a_chat(place):
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1] * 150_000}}
    ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "assistant", "content": [use]}]}
    first = place[1].post("/v1/messages", {**ask, "thread": {"type": "create"}})[2]
    thread = {"type": "continue", "previous_message_id": first["id"]}
    status, _, reply = place[1].post("/v1/messages", {**ask, "thread": thread})
    assert status == 400 and "thread.previous_message_id" in reply["error"]["message"]


def test_what_tokenize_gives_detokenize_takes(place, monkeypatch):
    engine, raw, _ = place
    most = tokens.MOST
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: [1] * len(text))
    status, _, reply = raw.post("/tokenize", {"prompt": "x" * (most + 1)})
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert str(most) in reply["error"]["message"]
    ids = raw.post("/tokenize", {"prompt": "x" * most})[2]["tokens"]
    assert len(ids) == most and raw.post("/detokenize", {"model": "m", "tokens": ids})[0] == 200


def test_what_stands_in_strings_does_not_count(place):
    text = '1,2,[{"a":"\\"}],' * 100_000
    status, _, _ = place[1].post(CHAT, {"messages": [{"role": "user", "content": text}]})
    assert status == 200
    assert place[0].requests[-1].messages[0]["content"] == text


def test_faults_are_told_up_to_the_first_of_a_list():
    tracemalloc.start()
    with pytest.raises(RequestError) as refused:
        read(ChatBody, {"messages": [1] * 200_000, "tools": [{}] * 1000, "n": "x"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, "a million faults were told before, at a kilobyte each"
    told = str(refused.value)
    assert len(told) < 500 and "messages[0]: " in told and "tools[0]." in told and "n: " in told


def test_metadata_has_few_pairs(place):
    pairs = {str(i): 1 for i in range(17)}
    status, _, reply = place[1].post("/v1/responses", {"input": "hi", "metadata": pairs})
    assert (status, reply["error"]["param"]) == (400, "metadata")
    assert json.dumps(reply).count("metadata: ") == 1
