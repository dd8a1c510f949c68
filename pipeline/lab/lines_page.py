"""What the page costs those who are being answered while somebody looks at it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from functools import partial

from pipeline.lab import texts
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import Bench, Line
from pipeline.lab.sse import BenchError

TOKENS = 160  # some seconds, so that figures are taken several times


class Viewer:
    """Reads /events, as the page does, until `close`. `seen` counts the figures."""

    def __init__(self, port: int):
        self.seen = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._connection.connect()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._connection.request("GET", "/events")
            for line in self._connection.getresponse():
                self.seen += line.startswith(b"event: figures")


@contextlib.contextmanager
def looked_at(port: int) -> Iterator[None]:
    """BenchError if nothing was shown meanwhile: then it was not looked at."""
    viewer = Viewer(port)
    try:
        yield
    finally:
        viewer.close()
    if viewer.seen < 2:
        raise BenchError(f"the page was shown {viewer.seen} times")


def page(bench: Bench) -> list[Figure]:
    """Tokens a second of one row with the page open, against the same server without."""
    (one,) = bench.field.take("ours")
    prompt = texts.read("continue").splitlines()[1]
    ask = partial(one.complete, prompt, max_tokens=TOKENS, ignore_eos=True)
    ask()  # the prompt is known from now on

    def shown(index: int) -> float:
        with looked_at(one.port):
            return ask().rate

    def alone(index: int) -> float:
        return ask().rate

    pairs = [(a, b) for a, b in bench.alternate("page", [shown, alone])]
    title = "decode with the page open, against without"
    return [ratio("page", title, pairs, Promise(">=", 0.99))]


LINES = (Line(("page",), page),)
