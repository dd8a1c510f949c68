"""One HTTP client for every contestant: posts a completion and stamps each event as it arrives.

The standard library's client, read line by line: it costs the contestants, who share the cores with
it, the same and little. Acknowledging at once keeps the kernel's delayed ACK, which holds back small
writes of servers that did not ask for TCP_NODELAY, out of the figures.
"""

from __future__ import annotations

import bisect
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.server.local import SocketConnection


class BenchError(RuntimeError):
    """A contestant did not answer as expected; the figure would mean nothing. `code` is what its
    process ended with, where it ended: 2 is the user's to mend."""

    code: int | None = None


class Refused(BenchError):
    """It answered, and said itself why not: its log need not be read."""


@dataclass
class Reply:
    """One streamed answer; seconds count from `began`, when the request was about to be sent."""

    began: float = 0.0  # perf_counter seconds
    texts: list[str] = field(default_factory=list)  # pieces of text, empty ones left out
    times: list[float] = field(default_factory=list)  # when each piece came
    seconds: float = 0.0  # until the end of the stream
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int = 0
    finish: str = ""
    told: dict[str, Any] = field(default_factory=dict)  # ours: seed, timings, speculation
    left: bool = False  # the client hung up before the end

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def first(self) -> float:
        """Seconds to the first text, or to the end where one token had none."""
        return self.times[0] if self.times else self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second after the first piece, for servers that send a piece a token."""
        if len(self.times) < 2:
            raise BenchError(f"too short to time: {self.text!r} ({self.finish})")
        return (self.tokens - 1) / (self.times[-1] - self.times[0])

    def tokens_between(self, start: float, stop: float) -> float:
        """Tokens that came between two perf_counter instants, with fractions of tokens at both."""
        return self._tokens_until(stop) - self._tokens_until(start)

    def _tokens_until(self, instant: float) -> float:
        at = instant - self.began
        index = bisect.bisect_right(self.times, at)
        whole = float(index)
        if 0 < index < len(self.times):
            before, after = self.times[index - 1 : index + 1]
            whole += (at - before) / (after - before)
        return whole * self.tokens / len(self.times)


def events(lines: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    """The JSON of each `data:` line up to `[DONE]`; comments and blank lines are passed over. EOFError
    without `[DONE]`: where nothing tells its length, an answer that breaks off only ends."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise EOFError("it ended without [DONE]")


def take(reply: Reply, event: Mapping[str, Any], now: float) -> None:
    """Add one event to the reply."""
    if "error" in event:
        raise BenchError(str(event["error"]))
    for choice in event.get("choices", ()):
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            reply.texts.append(text)
            reply.times.append(now)
        reply.finish = choice.get("finish_reason") or reply.finish
        reply.told = choice.get("headrace") or reply.told
    if usage := event.get("usage"):
        reply.prompt_tokens = usage["prompt_tokens"]
        reply.tokens = usage["completion_tokens"]
        reply.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def post(
    port: int,
    path: str,
    body: Mapping[str, Any],
    timeout_s: float = 300.0,
    leave_after: int | None = None,
) -> Reply:
    """Stream one completion from 127.0.0.1:`port`, or its first `leave_after` pieces of text.
    Refused, or BenchError if it breaks off."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with _whole(), contextlib.closing(connection):
        connection.connect()
        sock = connection.sock  # the response may take it away from the connection
        reply = Reply(began=time.perf_counter())
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, data.encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(f"HTTP {response.status}: {response.read(500)!r}")
        for event in events(_lines(response, sock)):
            take(reply, event, time.perf_counter() - reply.began)
            if leave_after is not None and len(reply.times) >= leave_after:
                reply.left, reply.tokens = True, len(reply.times)
                break
        reply.seconds = time.perf_counter() - reply.began
    return reply


def _lines(response: http.client.HTTPResponse, sock: Any) -> Iterator[bytes]:
    """Lines as they arrive. The quick-ACK mode lasts only until the kernel thinks better of it."""
    quick = getattr(socket, "TCP_QUICKACK", None)  # Linux
    while True:
        if quick is not None:
            with contextlib.suppress(OSError):  # the answer is over and the socket closed
                sock.setsockopt(socket.IPPROTO_TCP, quick, 1)
        if not (line := response.readline()):
            return
        yield line


def get(port: int, path: str, timeout_s: float = 5.0) -> bytes:
    return _plain(http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s), "GET", path)


def order(place: str, path: str) -> bytes:
    """POST without a body, to the server's Unix socket at `place`."""
    return _plain(SocketConnection(place), "POST", path)


def _plain(connection: http.client.HTTPConnection, method: str, path: str) -> bytes:
    with _whole(), contextlib.closing(connection):
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise Refused(f"{method} {path}: HTTP {response.status}")
        return body


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """BenchError for an answer that does not come, or breaks off."""
    try:
        yield
    except (http.client.HTTPException, OSError, EOFError, ValueError) as error:
        raise BenchError(f"no whole answer: {error}") from error
