"""A server told to stop: it answers until it has drained, and what is left ends with an error."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pipeline.server.run import run_server
from pipeline.server.settings import ServerSettings
from pipeline.types import Accepted, Delta

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**ASK, "stream": True}


def endless(_: Any) -> Iterator[Any]:
    yield Accepted(1)
    while True:
        yield Delta("a", (1,))
        yield 0.01


def serve_while(engine: Any, shutdown_s: float, client: Callable[[str], None]) -> None:
    """Run a server here, signals and all, while `client(base URL)` runs in a thread."""
    with ThreadPoolExecutor(1) as pool:
        result: list[Future[None]] = []

        def announce(line: str) -> None:
            result.append(pool.submit(client, line.split()[-1]))

        run_server(engine, ServerSettings(port=0, shutdown_s=shutdown_s), announce)
        result[0].result(timeout=10)


def interrupt(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def check_cut(stream: tuple[int, Any, bytes], whole: tuple[int, Any, bytes]) -> None:
    lines = [line for line in stream[2].decode().split("\n") if line]
    assert stream[0] == 200
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_closed"
    assert sum("error" in line for line in lines) == 1
    assert b"[DONE]" not in stream[2]
    assert (whole[0], json.loads(whole[2])["error"]["code"]) == (503, "engine_closed")


def test_what_outlives_the_drain_ends_with_an_error(script, caplog):
    engine, seen = script.Engine(), {}
    engine.plan = endless

    def client(base: str) -> None:
        raw, body = script.Raw(base), json.dumps(ASK).encode()
        with ThreadPoolExecutor(2) as pool:
            stream = pool.submit(raw.call, "POST", CHAT, json.dumps(STREAM).encode())
            whole = pool.submit(raw.call, "POST", CHAT, body)
            script.eventually(lambda: engine.active == 2)
            seen["before"] = raw.call("GET", "/ready")[0]
            interrupt()
            script.eventually(lambda: engine.state == "draining")
            seen["drain"] = [raw.call("GET", path)[0] for path in ("/ready", "/health")]
            seen["new"] = raw.call("POST", CHAT, body)[0]
            check_cut(stream.result(), whole.result())

    began = time.monotonic()
    serve_while(engine, 0.8, client)
    assert 0.8 <= time.monotonic() - began < 4
    assert seen == {"before": 200, "drain": [503, 200], "new": 503}
    assert engine.closed.is_set()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_second_interrupt_cuts_the_drain_short(script):
    engine = script.Engine()
    engine.plan = endless

    def client(base: str) -> None:
        raw = script.Raw(base)
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(raw.call, "POST", CHAT, json.dumps(body).encode())
                for body in (STREAM, ASK)
            ]
            script.eventually(lambda: engine.active == 2)
            interrupt(signal.SIGINT)
            script.eventually(lambda: engine.state == "draining")
            interrupt(signal.SIGINT)
            check_cut(*(ask.result() for ask in asked))

    began = time.monotonic()
    serve_while(engine, 30, client)
    assert time.monotonic() - began < 4


def test_a_client_that_does_not_read_is_not_waited_for(script, caplog, monkeypatch):
    monkeypatch.setattr("pipeline.server.drain.FLUSH_S", 0.3)
    engine = script.Engine()
    engine.plan = lambda _: [Accepted(1), *[Delta("x" * 1000, (1,))] * 20_000, 60.0]
    body = json.dumps(STREAM)
    sockets = []

    def client(base: str) -> None:
        host, port = base.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)), timeout=5)
        sockets.append(sock)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body.encode())
        script.eventually(lambda: engine.active == 1)
        time.sleep(0.2)
        interrupt()

    began = time.monotonic()
    serve_while(engine, 0.3, client)
    assert time.monotonic() - began < 4
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    sockets[0].close()


@contextmanager
def command(*overrides: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headrace serve fake` in a process of its own, and its address."""
    verb = ("-c", "from pipeline.cli import main; raise SystemExit(main())", "serve", "fake")
    process = subprocess.Popen(
        [sys.executable, *verb, "server.port=0", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("Headrace serves"))
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_the_command_ends_with_0_and_without_a_traceback(script):
    with command("server.shutdown_s=0.5", "model.delay_ms=10") as (process, base):
        connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=10)
        connection.request("POST", CHAT, json.dumps(STREAM))
        reply = connection.getresponse()
        assert b"assistant" in reply.readline()
        process.send_signal(signal.SIGTERM)
        rest = reply.read()
        _, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    assert b"engine_closed" in rest
    assert b"[DONE]" not in rest
    assert "Traceback" not in err
    assert "ending: running answers have 0.5 s; a second signal ends them now" in err
    (line,) = [json.loads(line) for line in err.splitlines() if CHAT in line]
    assert (line["status"], line["finish_reason"], line["error"]) == (
        200,
        "failed",
        "engine_closed",
    )


def streaming(base: str) -> http.client.HTTPConnection:
    """A connection on which an answer has begun."""
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=10)
    connection.request("POST", CHAT, json.dumps({**STREAM, "ignore_eos": True}))
    assert b"assistant" in connection.getresponse().readline()
    return connection


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    """128 and its number; clients are still told, and the socket is gone."""
    path = tmp_path / "socket"
    with command("model.delay_ms=20", f"server.socket={path}") as (process, base):
        connection = streaming(base)
        assert path.exists()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None, "the first one lets it finish"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - began < 10
        connection.close()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "Traceback" not in err and not path.exists()


def test_an_end_that_hangs_has_a_bound():
    """A pass of the model that takes a minute: nothing can be closed before."""
    late = ("model.delay_ms=60000", "server.shutdown_s=0.2", "server.close_s=0.5")
    with command(*late) as (process, base):
        connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=10)
        connection.request("POST", CHAT, json.dumps(STREAM))
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - began < 10
        connection.close()
    assert process.returncode == 1
    assert "not closed within 0.7 s" in err


def test_the_end_writes_what_is_to_be_saved(tmp_path):
    disk = ("tier=[ram,disk]", f"tier.disk.path={tmp_path / 'states'}", "tier.disk.reserve_gb=0")
    log = tmp_path / "log"
    late = ("stage.spill.debounce_s=600", f"server.log={log}")
    with command("drafter=none", *disk, *late) as (process, base):
        connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=10)
        body = {"prompt": "word " * 200, "max_tokens": 2}
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert connection.getresponse().status == 200
        assert not list((tmp_path / "states").rglob("*.safetensors"))
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        connection.close()
    assert process.returncode == 0, err
    assert list((tmp_path / "states").rglob("*.safetensors"))
    assert json.loads(log.read_text().splitlines()[0])["prompt_tokens"] > 100
    assert err == ""
