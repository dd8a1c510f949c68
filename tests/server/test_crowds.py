"""Many at once, and clients that are slow or do not read: each is bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import subprocess
import sys
import time

import pytest
from starlette.requests import Request

from pipeline.errors import ConfigError
from pipeline.server import connection
from pipeline.server.caller import Caller
from pipeline.server.pools import Pools
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.server.viewers import Viewers
from pipeline.types import Accepted, Delta

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}
SECRETS = {name: f"hr-secret-of-{name}" for name in ("alice", "bob")}


@pytest.fixture
def place(script, tmp_path):
    """Of a server with room for little: its engine, a client on the port, one on the socket."""
    keys = {n: {"sha256": hashlib.sha256(s.encode()).hexdigest()} for n, s in SECRETS.items()}
    (tmp_path / "keys").write_text(json.dumps(keys))
    path, engine = str(tmp_path / "socket"), script.Engine()
    settings = ServerSettings(
        max_connections=8, unread_s=0.5, max_body_bytes=1 << 20, bodies_bytes=2 << 20,
        keys=str(tmp_path / "keys"), socket=path, keepalive_s=0.1, shutdown_s=1,
    )  # fmt: skip
    with serve_in_thread(engine, settings) as base:
        yield engine, script.Raw(base), script.Raw(path=path)


@contextlib.contextmanager
def connected(raw, text=b"", **options):
    """A socket on which this has been sent."""
    host, port = raw.address.split(":")
    with socket.socket() as sock:
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.settimeout(5)
        sock.connect((host, int(port)))
        sock.sendall(text)
        yield sock


def post(body, key="alice", announced=None):
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRETS[key]}\r\n"
    return f"{head}Content-Length: {announced or len(data)}\r\n\r\n".encode() + data


def bearer(key):
    return {"authorization": f"Bearer {SECRETS[key]}"}


def ask(raw, body=ASK, key="bob"):
    status, headers, reply = raw.call("POST", CHAT, json.dumps(body).encode(), **bearer(key))
    return status, headers, json.loads(reply)


def test_one_connection_too_many(place, script):
    """It is told so and closed; whoever is in stays, and the operator is let in all the same."""
    _, raw, local = place
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connected(raw)) for _ in range(8)]
        status, headers, reply = ask(raw)
        assert (status, reply["error"]["code"]) == (429, "too_many_connections")
        assert headers["retry-after"] == "1" and headers["connection"] == "close"
        assert raw.call("GET", "/health")[0] == 200, "it lives"
        assert local.call("GET", "/stats")[0] == 200
        crowd[0].sendall(post(ASK))
        assert crowd[0].recv(100).startswith(b"HTTP/1.1 200")
    script.eventually(lambda: ask(raw)[0] == 200)


def test_connections_that_say_nothing_are_no_files_without_end(place, monkeypatch):
    monkeypatch.setattr(connection, "REFUSALS", 2)
    raw, ended = place[1], 0
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connected(raw)) for _ in range(15)]
        for sock in crowd[10:]:
            with contextlib.suppress(ConnectionError):
                ended += sock.recv(1) != b""
            ended += 1
        assert ended == 5
        crowd[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            crowd[0].recv(1)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_rests_is_one_that_has_gone(place, script, stream):
    """Its row ends while it has not written all, and its neighbour gets every token of its own."""
    engine, raw, _ = place
    pieces = [step for _ in range(300) for step in (Delta("x" * 4000, (1,)), 0.01)]
    few = [step for _ in range(150) for step in (Delta("y", (1,)), 0.01)]
    resting = [Accepted(1), *pieces] if stream else [Accepted(1), *pieces[::2]]

    def plan(request):
        wanted = request.messages[0]["content"]
        return [*(resting if wanted == "hi" else [Accepted(1), *few]), script.done("length", 150)]

    engine.plan = plan
    with connected(raw, post({**ASK, "stream": stream}), SO_RCVBUF=8192) as sock:
        script.eventually(lambda: len(engine.requests) == 1)
        began = time.monotonic()
        status, _, reply = ask(raw, {"messages": [{"role": "user", "content": "me"}]})
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "y" * 150)
        script.eventually(lambda: engine.active == 0)
        assert time.monotonic() - began < 2.9, "before all of it was written"
        assert engine.tickets[0].cancelled.is_set() == stream
        with contextlib.suppress(ConnectionError):  # a reset is an end, too
            while sock.recv(65536):
                pass


def test_a_slow_reader_that_goes_on_reading_gets_all(place, script):
    engine, raw, _ = place
    engine.plan = lambda _: [
        Accepted(1),
        *[Delta("x" * 20_000, (1,))] * 50,
        script.done("stop", 50),
    ]
    with connected(raw, post({**ASK, "stream": True}), SO_RCVBUF=8192) as sock:
        got, began = b"", time.monotonic()
        while b"[DONE]" not in got[-200:]:
            time.sleep(0.02)
            got += sock.recv(20_000)
    assert time.monotonic() - began > 0.9 and got.count(b"x") >= 1_000_000


def test_bodies_under_way_have_a_room(place, script):
    """A key fills half of it, whatever it has sent of a body, and gets it back when that is answered."""
    engine, raw, _ = place
    engine.plan = lambda _: [Accepted(1), 30.0]
    large = {"messages": [{"role": "user", "content": "x" * 600_000}]}
    with connected(raw, post({**large, "stream": True})) as answered:
        script.eventually(lambda: engine.active == 1)
        with connected(raw, post(large, announced=1_000_000)) as coming:
            assert coming.recv(1000).startswith(b"HTTP/1.1 429 ")
        status, headers, reply = ask(raw, large, "alice")
        assert (status, reply["error"]["code"]) == (429, "bodies_limit_exceeded")
        assert headers["retry-after"] == "1"
        engine.plan = script.greeting
        assert ask(raw, large, "bob")[0] == 200, "another key has its own half"
        answered.close()
    script.eventually(lambda: ask(raw, large, "alice")[0] == 200)


def test_pages_that_look_on_are_counted(place, script, monkeypatch):
    _, raw, _ = place
    monkeypatch.setattr("pipeline.server.viewers.SEATS", 2)
    head = f"Host: localhost\r\nAuthorization: Bearer {SECRETS['alice']}"
    look = f"GET /events HTTP/1.1\r\n{head}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        pages = [stack.enter_context(connected(raw, look.encode())) for _ in range(2)]
        assert all(page.recv(100).startswith(b"HTTP/1.1 200") for page in pages)
        status, _, reply = raw.call("GET", "/events", **bearer("alice"))
        assert (status, json.loads(reply)["error"]["code"]) == (429, "concurrency_limit_exceeded")
        pages[0].close()

        def again():
            with connected(raw, look.encode()) as page:
                return page.recv(100).startswith(b"HTTP/1.1 200")

        script.eventually(again)


def test_seats_hold_in_a_burst(script, monkeypatch):
    """All of them may be let in before the first is shown anything."""
    monkeypatch.setattr("pipeline.server.viewers.SEATS", 2)
    viewers = Viewers(script.Engine(), Pools())
    scope = {"type": "http", "state": {"caller": Caller("alice")}}

    async def never(*_):
        await asyncio.Event().wait()

    async def burst():
        pages = [await viewers.events(Request(scope)) for _ in range(4)]
        looking = [asyncio.create_task(page(scope, never, never)) for page in pages]
        await asyncio.sleep(0.05)
        refused = [task.exception() for task in looking if task.done()]
        assert [error.code for error in refused] == ["concurrency_limit_exceeded"] * 2
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
        again = asyncio.create_task((await viewers.events(Request(scope)))(scope, never, never))
        await asyncio.sleep(0.05)
        assert not again.done(), "what was taken has been given back"
        again.cancel()

    asyncio.run(burst())


def test_bounds_that_make_no_sense():
    with pytest.raises(ConfigError) as refused:
        ServerSettings(max_connections=0, unread_s=0, bodies_bytes=1 << 20)
    assert [problem.where for problem in refused.value.problems] == [
        "server.max_connections",
        "server.unread_s",
        "server.bodies_bytes",
    ]


@pytest.mark.parametrize(
    ("soft", "hard", "becomes"), [(64, 4000, 768), (64, 100, 100), (900, 4000, 900)]
)
def test_files_for_all_connections(soft, hard, becomes):
    code = f"""
import resource
from pipeline.server.listening import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_files(512)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(becomes), str(hard)]
