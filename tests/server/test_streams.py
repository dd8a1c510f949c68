"""Streams under bad weather: silence, failure, clients that leave or do not read, shutdown."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from pipeline.errors import ClosedError, ConfigError, OpenError
from pipeline.server.run import run_server
from pipeline.server.settings import ServerSettings
from pipeline.types import Accepted, Delta, Failed

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def posted(base: str, body: dict[str, Any]):
    """A socket on which the request has been sent; closed at the end, read or not."""
    host, port = urlsplit(base).netloc.split(":")
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(head.encode() + data)
        yield sock


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        got = sock.recv(65536)
        assert got, data
        data += got
    return data


def test_signs_of_life_by_the_clock(engine, served, script):
    """Headers at admission, a comment in every silence: in prefill, and while text is held back."""
    held = [step for _ in range(20) for step in (Delta("", (1,)), 0.02)]
    engine.plan = lambda _: [Accepted(1), 1.0, *held, Delta("x", (2,)), script.done("stop", 21)]
    times, data = [time.monotonic()], b""
    with posted(served[1], {**ASK, "stream": True}) as sock:
        while b"[DONE]" not in data:
            data += sock.recv(65536)
            times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps[0] < 0.5
    assert max(gaps) < 0.8
    assert data.count(b": keep-alive\n\n") >= 6
    events = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    assert len(events) == 3  # role, text, end


def test_keep_alives_do_not_disturb_the_official_client(engine, client, script):
    engine.plan = lambda _: [
        0.25,
        Accepted(1),
        0.25,
        Delta("a", (1,)),
        0.25,
        script.done("stop", 1),
    ]
    chunks = client.chat.completions.create(**ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a"


def test_no_nagle_delay(engine, served):
    """Replies and chunks leave at once: with the delay, 20 requests would take 0.8 s."""
    connection = http.client.HTTPConnection(urlsplit(served[1]).netloc)
    began = time.monotonic()
    for _ in range(20):
        connection.request("POST", CHAT, json.dumps(ASK))
        assert connection.getresponse().read()
    assert time.monotonic() - began < 0.6
    connection.close()


def test_health_answers_while_streams_run(engine, served, raw):
    engine.plan = lambda _: [Accepted(1), 30.0]
    with posted(served[1], {**ASK, "stream": True}) as sock:
        read_until(sock, b"assistant")
        began = time.monotonic()
        assert raw.call("GET", "/health")[0] == 200
        assert time.monotonic() - began < 0.5


@pytest.mark.parametrize(
    ("plan", "stream", "mark"),
    [
        ([Accepted(1), 30.0], True, b"assistant"),
        ([Accepted(1), *(Delta("a", (1,)), 0.01) * 3, 30.0], True, b'"a"'),
        ([Accepted(1), Delta("a", (1,)), 30.0], False, None),
        ([30.0, Accepted(1)], True, None),
        ([30.0, Accepted(1)], False, None),
    ],
    ids=["prefill", "decode", "whole", "queued-stream", "queued-whole"],
)
def test_a_client_that_leaves_ends_its_row(engine, served, client, script, plan, stream, mark):
    engine.plan = lambda _: plan
    with posted(served[1], {**ASK, "stream": stream}) as sock:
        if mark:
            read_until(sock, mark)
        script.eventually(lambda: engine.active == 1)
    script.eventually(lambda: engine.active == 0)
    engine.plan = script.greeting
    assert client.chat.completions.create(**ASK).choices[0].message.content == script.TEXT


def test_leaving_disturbs_no_neighbour(engine, served, client, script):
    pieces = [step for _ in range(30) for step in (Delta("a", (1,)), 0.01)]
    engine.plan = lambda _: [Accepted(1), *pieces, script.done("length", 30)]
    with posted(served[1], {**ASK, "stream": True}) as sock:
        read_until(sock, b"assistant")
        chunks = client.chat.completions.create(**ASK, stream=True)
        next(iter(chunks))
        sock.close()
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "a" * 30


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (RuntimeError("secret"), "server_error", False),
        (ClosedError("stopping"), "server_error", True),
    ],
)
def test_failure_in_mid_stream(engine, client, raw, error, kind, told):
    engine.plan = lambda _: [Accepted(1), Delta("a", (1,)), 0.05, Failed(error)]
    lines = raw.events(CHAT, {**ASK, "stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks[-1]["error"]["type"] == kind
    assert (str(error) in chunks[-1]["error"]["message"]) == told
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    with pytest.raises(openai.APIError):
        list(client.chat.completions.create(**ASK, stream=True))


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_a_cut_answer_never_looks_complete(engine, raw, served, script, reason):
    shown = threading.Event()

    def plan(request):
        yield Accepted(1)
        yield Delta("a", (1,))
        assert shown.wait(5)  # the answer is cut when its beginning has been read
        yield script.done(reason, 1)

    engine.plan = plan
    with posted(served[1], {**ASK, "stream": True}) as sock:
        read_until(sock, b'"content":"a"')
        shown.set()
        last = read_until(sock, b"0\r\n\r\n").decode().split("data: ")[-1]
    assert "error" in json.loads(last.splitlines()[0])
    assert raw.post(CHAT, ASK)[0] == (503 if reason == "cancelled" else 500)


def test_a_slow_reader_gets_all_of_it_in_fewer_chunks(engine, served, client, script):
    text = "x" * 200
    pieces = [Delta(f"{i:05}{text}", (1,)) for i in range(10_000)]
    engine.plan = lambda _: [Accepted(1), *pieces, script.done("length", 10_000)]
    with posted(served[1], {**ASK, "stream": True}) as sock:
        head = read_until(sock, b"assistant")
        script.eventually(lambda: engine.active == 0)
        engine.plan = script.greeting
        assert client.chat.completions.create(**ASK).choices[0].message.content == script.TEXT
        data = (head + read_until(sock, b"[DONE]")).decode()
    assert data.count("data: {") < 5000
    starts = [data.find(f"{i:05}x") for i in range(0, 10_000, 500)]
    assert -1 not in starts
    assert starts == sorted(starts)


@contextmanager
def signalled(after: threading.Event, number: int):
    def send() -> None:
        after.wait(5)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_shutdown_lets_running_answers_finish(script, number):
    engine, started, got = script.Engine(), threading.Event(), []
    pieces = [step for _ in range(20) for step in (Delta("a", (1,)), 0.02)]
    engine.plan = lambda _: [Accepted(1), *pieces, script.done("stop", 20)]
    before = signal.getsignal(number)

    def ask(line: str) -> None:
        with posted(line.split()[-1], {**ASK, "stream": True}) as sock:
            read_until(sock, b"assistant")
            started.set()
            got.append(read_until(sock, b"[DONE]"))

    asking: list[threading.Thread] = []

    def announce(line: str) -> None:
        asking.append(threading.Thread(target=ask, args=(line,)))
        asking[0].start()

    with signalled(started, number):
        run_server(engine, ServerSettings(port=0, shutdown_s=5), announce)
    asking[0].join()
    assert len(got) == 1
    assert engine.closed.is_set()
    assert signal.getsignal(number) is before


def test_a_taken_port_is_said_and_the_engine_closed(script):
    engine = script.Engine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OpenError, match="in use"):
            run_server(engine, ServerSettings(port=taken.getsockname()[1]))
    assert engine.closed.is_set()


def test_settings_name_all_problems():
    with pytest.raises(ConfigError) as caught:
        ServerSettings(port=70_000, keepalive_s=0)
    assert [problem.where for problem in caught.value.problems] == [
        "server.port",
        "server.keepalive_s",
    ]
