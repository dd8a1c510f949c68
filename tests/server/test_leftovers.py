"""What was asked is gone once it is answered: it never waits for Python's collector, which comes after thousands of
requests and would stop every stream while it looks through what they have left."""

from __future__ import annotations

import gc
import json
import socket
import struct
from typing import Any

import pytest

import pipeline
from pipeline.errors import ClosedError, HeadraceError
from pipeline.server.answer import Answer
from pipeline.server.connection import Connection
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.server.speech import Speech
from pipeline.types import Accepted, Delta, Failed
from pipeline.types.sequence import Sequence

KEPT = (Answer, Connection, HeadraceError, Sequence, Speech)
TEXT = {"prompt": "hello", "max_tokens": 6}
LONG = TEXT | {"prompt": "hello" * 2000}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
INPUT = {"input": "hello", "max_output_tokens": 6}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", TEXT),
    "no tokens": ("/v1/completions", TEXT | {"max_tokens": 0}),
    "choices": ("/v1/completions", TEXT | {"n": 3, "temperature": 1}),
    "chat": ("/v1/chat/completions", CHAT),
    "stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "stop": ("/v1/chat/completions", CHAT | {"stop": ["e", "a"], "logprobs": True}),
    "response": ("/v1/responses", INPUT | {"stream": True, "store": False}),
    "message": ("/v1/messages", CHAT | {"stream": True}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a bad field": ("/v1/chat/completions", CHAT | {"temperature": "hot"}),
    "too long": ("/v1/completions", LONG),
    "too long, streamed": ("/v1/completions", LONG | {"stream": True}),
    "too long, choices": ("/v1/completions", LONG | {"n": 3, "temperature": 1}),
    "no such address": ("/v1/nowhere", TEXT),
}


@pytest.fixture(scope="module")
def base():
    with (
        pipeline.load("fake", "model.layers=1", "model.delay_ms=0.5") as engine,
        serve_in_thread(engine, ServerSettings()) as base,
    ):
        yield base


@pytest.fixture
def left():
    """What has come since and is still there, by name; nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    before = kept()  # by servers of other tests
    known = {id(one) for one in before}
    yield lambda: [type(one).__name__ for one in kept() if id(one) not in known]
    gc.enable()


def kept() -> list[Any]:
    return [one for one in gc.get_objects() if isinstance(one, KEPT)]


@pytest.mark.parametrize("name", ASKED)
def test_an_answered_request_leaves_nothing(base, script, left, name):
    path, body = ASKED[name]
    status, _, _ = script.Raw(base).call("POST", path, json.dumps(body).encode())
    assert status == 200
    script.eventually(lambda: not left(), 3)


@pytest.mark.parametrize("name", REFUSED)
def test_nor_does_one_that_is_refused(base, script, left, name):
    path, body = REFUSED[name]
    status, _, _ = script.Raw(base).call("POST", path, json.dumps(body).encode())
    assert status == (404 if name == "no such address" else 400)
    script.eventually(lambda: not left(), 3)


def test_nor_does_a_stream_that_fails(engine, raw, script, left):
    plan = [Accepted(5), 0.2, Delta("Hel", (1,)), 0.2]
    engine.plan = lambda request: [*plan, Failed(ClosedError("ended"))]
    assert "ended" in raw.events("/v1/completions", TEXT | {"stream": True})[-1]
    script.eventually(lambda: not left(), 3)


@pytest.mark.parametrize("heard", ["nothing", "all"])
def test_nor_does_one_whose_client_has_reset_its_connection(base, script, left, heard):
    """uvicorn leaves its keep-alive timer, and by it all there was, where that comes behind the answer."""
    path, body = ASKED["stream" if heard == "nothing" else "chat"]
    body = body | {"max_tokens": 200 if heard == "nothing" else 6}
    data = json.dumps(body).encode()
    host, port = script.Raw(base).address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        sock.recv(100)
    script.eventually(lambda: not left(), 3)
