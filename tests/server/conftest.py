"""A scripted engine with the real one's surface, and a server over it, one a module."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from pipeline.errors import BusyError, ClosedError
from pipeline.leases import Leases
from pipeline.ownership import Ownership
from pipeline.server.local import SocketConnection
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.types import (
    Accepted,
    Delta,
    Done,
    Event,
    Failed,
    Request,
    Speculation,
    TokenLogprob,
    Usage,
)
from stages.models.fake import ByteTokens

EOS = 0
PIECES = ["", "Hel", "lo ", "wör", b"\xf0\x9f", b"\x91\x8b", "\u2028", "\0end"]  # by token id
TEXT = "Hello wör\N{WAVING HAND SIGN}\u2028\0end"
Plan = Callable[[Request], Iterable[Event | float]]


QWEN = (
    "{% if tools %}{{ tool_call.name }}<tool_call>{% endif %}<think></think>{{ messages }}"
    "{{ enable_thinking }}"
)


class FakeTokenizer:
    template: str | None = QWEN
    special_ids = frozenset({EOS})
    dialect = ByteTokens(QWEN).dialect

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [1, 2, 3][: len(text)]

    def render(self, messages: Any, args: Any, *, reply: bool = True) -> list[int]:
        return list(range(1, 2 + len(messages) + reply))

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token_id: int) -> bytes:
        piece = PIECES[token_id] if token_id < len(PIECES) else f"t{token_id}"
        return (piece or "<eos>").encode() if isinstance(piece, str) else piece


def logprob(token_id: int, top: int) -> TokenLogprob:
    best = tuple((EOS + 1 + i, -1.0 - i) for i in range(top))
    return TokenLogprob(token_id, -0.5, best)


def greeting(request: Request) -> Iterator[Event | float]:
    """The pieces one token at a time, the emoji held back until it is whole; stop or length."""
    limit = len(PIECES) if request.max_tokens is None else request.max_tokens
    ids = [*range(1, len(PIECES)), EOS][:limit]
    yield Accepted(5)
    for token in ids:
        if token == EOS:  # counted, never delivered
            continue
        piece = PIECES[token]
        text = piece if isinstance(piece, str) else "\N{WAVING HAND SIGN}" * (token == 5)
        wanted = () if request.logprobs is None else (logprob(token, request.logprobs),)
        yield Delta(text, (token,), wanted)
    yield done("stop" if EOS in ids else "length", len(ids), request.sampling.seed or 7)


def saying(text: str, size: int = 3, inside: bool = False, **last: Any) -> Plan:
    """An answer that says this, `size` letters a token; the ids are those of the bytes."""

    def plan(request: Request) -> Iterator[Event | float]:
        yield Accepted(5, inside)
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            yield Delta(piece, tuple(piece.encode()))
        end = done("stop", len(text.encode()))
        yield replace(end, **last)

    return plan


def done(reason: str, tokens: int, seed: int = 7) -> Done:
    usage = Usage(prompt_tokens=5, completion_tokens=tokens, cached_tokens=3)
    speculation = Speculation(2, 3, 1, (2, 1), (1, 0), 4)
    return Done(reason, usage, seed, {"ttft": 0.1}, speculation)  # type: ignore[arg-type]


class FakeTicket:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """Plays `plan(request)` on a thread a request; a float is a pause in seconds."""

    def __init__(self) -> None:
        self.target_info = {
            "name": "fake/one",
            "context_len": 64,
            "vocab_size": 100,
            "eos_ids": [0],
            "max_open": 1000,
            "priorities": True,
            "adapters": ["sql", "poet"],
        }
        self.tokenizer = FakeTokenizer()
        self.plan: Plan = greeting
        self.requests: list[Request] = []
        self.tickets: list[FakeTicket] = []
        self.sessions: list[str] = []  # those that were closed
        self.ownership = Ownership(lambda: None)
        self.leases = Leases(self.ownership, lambda: self.state == "open")
        self.active = 0
        self.room = 1000
        self.state = "open"
        self.closed = threading.Event()
        self._lock = threading.Lock()

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> FakeTicket:
        with self._lock:
            if self.state != "open":
                raise ClosedError("the engine is closed")
            if self.active >= self.room:
                raise BusyError("the queue is full", retry_after_s=2.5)
            self.requests.append(request)
            self.active += 1
            ticket = FakeTicket()
            self.tickets.append(ticket)
        threading.Thread(target=self._play, args=(request, deliver, ticket), daemon=True).start()
        return ticket

    def _play(self, request: Request, deliver: Callable[[Event], None], ticket: FakeTicket) -> None:
        last: Event = Failed(RuntimeError("secret detail"))
        try:
            for step in self.plan(request):
                if isinstance(step, float):
                    ticket.cancelled.wait(step)
                elif isinstance(step, Done | Failed):
                    last = step
                    break
                else:
                    deliver(step)
                if ticket.cancelled.is_set():
                    gone = self.closed.is_set()
                    last = Failed(ClosedError("stopped")) if gone else done("cancelled", 0)
                    break
        finally:
            with self._lock:
                self.active -= 1
            deliver(last)

    def stats(self) -> dict[str, Any]:
        return {"state": self.state, "rows": {"active": self.active, "name": "x"}}

    def health(self) -> dict[str, Any]:
        status = "ok" if self.state in ("open", "draining") else self.state
        return {"status": status, "state": self.state, "device": {"blas": "none"}}

    def describe(self) -> dict[str, Any]:
        return {"recipe": "fake"}

    def flush(self) -> dict[str, Any]:
        return {"durable": True}

    def close_session(self, session_id: str) -> None:
        self.sessions.append(session_id)

    def drain(self, timeout_s: float) -> bool:
        self.state = "draining"
        until = time.monotonic() + timeout_s
        while self.active and time.monotonic() < until:
            time.sleep(0.005)
        return not self.active

    def close(self) -> None:
        self.state = "closed"
        self.closed.set()
        for ticket in self.tickets:
            ticket.cancel()


class Raw:
    """A client that sends what the official one refuses to."""

    def __init__(self, base: str = "", path: str = ""):
        self.address, self.path = urlsplit(base).netloc, path

    def _connect(self) -> http.client.HTTPConnection:
        if self.path:
            return SocketConnection(self.path, timeout=10)
        return http.client.HTTPConnection(self.address, timeout=10)

    def call(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self._connect()
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def post(self, path: str, value: Any) -> tuple[int, dict[str, str], Any]:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        status, headers, data = self.call("POST", path, body)
        return status, headers, json.loads(data)

    def events(self, path: str, value: Any) -> list[str]:
        """All lines of a stream that are not empty."""
        status, _, data = self.call("POST", path, json.dumps(value).encode())
        assert status == 200, data
        assert data.isascii()
        return [line for line in data.decode().split("\n") if line]


def eventually(check: Callable[[], Any], timeout_s: float = 20.0) -> None:
    until = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine()
    settings = ServerSettings(keepalive_s=0.1, max_body_bytes=4096, max_choices=8, shutdown_s=1)
    with serve_in_thread(engine, settings) as base:
        yield engine, base


@pytest.fixture
def engine(served: tuple[FakeEngine, str]) -> FakeEngine:
    fake = served[0]
    eventually(lambda: fake.active == 0)
    fake.plan, fake.room, fake.state = greeting, 1000, "open"
    fake.requests.clear()
    return fake


@pytest.fixture
def raw(served: tuple[FakeEngine, str]) -> Raw:
    return Raw(served[1])


@pytest.fixture
def client(served: tuple[FakeEngine, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[1] + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(served: tuple[FakeEngine, str]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served[1], api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def script() -> Any:
    """What scripts are written with, for test files (they import nothing of each other)."""
    import types

    return types.SimpleNamespace(
        Engine=FakeEngine,
        Raw=Raw,
        done=done,
        eventually=eventually,
        greeting=greeting,
        TEXT=TEXT,
        saying=saying,
        types=types,
    )
