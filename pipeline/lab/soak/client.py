"""One HTTP request of a client that may not wait for the end, and what came of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.lab.soak.answers import Said, streamed, whole

PATIENCE_S = 600.0  # for the next byte; longer is a stuck row, whatever the machine does besides
ABRUPT = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is reset, not closed
JSON_TYPE = {"Content-Type": "application/json"}


class Refused(Exception):
    """A status that is no success."""

    def __init__(self, status: int, body: bytes):
        super().__init__(f"HTTP {status}: {body[:300]!r}")
        self.status, self.body = status, body


@dataclass(frozen=True)
class Leaving:
    """When a client hangs up: with a part of its request sent, after a while, or after some events."""

    sent: float = 1.0  # share of the request
    after_s: float | None = None
    events: int | None = None
    abruptly: bool = False

    @classmethod
    def draw(cls, draw: random.Random, streams: bool) -> Leaving:
        abruptly = draw.random() < 0.5
        kind = draw.choice(("sent", "after", "events" if streams else "after"))
        if kind == "sent":
            return cls(sent=draw.random(), abruptly=abruptly)
        if kind == "events":
            return cls(events=draw.randrange(1, 12), abruptly=abruptly)
        return cls(after_s=draw.random() * draw.choice((0.02, 0.2, 2.0)), abruptly=abruptly)


def call(port: int, method: str, path: str, data: bytes | None = None) -> bytes:
    """The body of a success. Refused, OSError."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, data, JSON_TYPE)
        response = connection.getresponse()
        body = response.read()
    if response.status >= 300:
        raise Refused(response.status, body)
    return body


def ask(
    port: int,
    path: str,
    body: Mapping[str, Any],
    *,
    stream: bool,
    begun: Callable[[], None] = lambda: None,
) -> tuple[Said, str]:
    """What the answer says, and its id. `begun` is told of the first byte. Refused, Broken, OSError."""
    data = json.dumps(_streaming(path, body) if stream else body).encode()
    if not stream:
        answer = json.loads(call(port, "POST", path, data))
        begun()
        return whole(path, answer), answer.get("id", "")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", path, data, JSON_TYPE)
        response = connection.getresponse()
        if response.status >= 300:
            raise Refused(response.status, response.read())
        events = []
        for event in _events(response):
            events.append(event)
            begun()
    said = streamed(path, events)
    return said, events[-1].get("response", {}).get("id", "")


def _streaming(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    more = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    return {**body, "stream": True, **more}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Each event's JSON; `[DONE]` is {}."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield {} if data == b"[DONE]" else json.loads(data)


def leave(port: int, path: str, body: Mapping[str, Any], leaving: Leaving) -> None:
    """Ask and hang up. Refused if a status came first that is no success."""
    stream = leaving.events is not None
    data = json.dumps(_streaming(path, body) if stream else body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n"
    message = head.encode() + b"Content-Type: application/json\r\n\r\n" + data
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(message[: int(leaving.sent * len(message))])
        if leaving.after_s is not None:
            time.sleep(leaving.after_s)
        if leaving.events is not None:
            _read_events(sock, leaving.events)
        if leaving.abruptly:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPT)


def _read_events(sock: socket.socket, count: int) -> None:
    data = b""
    while data.count(b"data: ") < count and (got := sock.recv(4096)):
        data += got
        if b"data: [DONE]" in data or b"message_stop" in data or b'"response.completed"' in data:
            return
    status = int(data[9:12] or 0)
    if status >= 300:
        raise Refused(status, data)
