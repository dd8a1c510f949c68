"""How much one key may ask for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from pipeline.errors import BusyError
from pipeline.server.keys import Key

AGAIN_S = 1.0  # when to ask again while as many requests run as may


class Quota:
    """A key's requests at a time, and a token bucket for its requests a minute: a minute's worth may come at
    once, and a refused request costs nothing. On the event loop only."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic):
        self._most, self._rate, self._clock = key.concurrent, key.rate, clock
        self._room = max(1.0, key.rate or 1.0)  # requests
        self._left, self._at = self._room, clock()
        self._running = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """One request, until it has been answered. BusyError if it is one too many."""
        if self._most is not None and self._running >= self._most:
            message = f"This key's requests at a time are under way: {self._most}."
            raise BusyError(message, retry_after_s=AGAIN_S, code="concurrency_limit_exceeded")
        if self._rate is not None:
            self._spend(self._rate)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def _spend(self, rate: float) -> None:
        now, per_s = self._clock(), rate / 60
        self._left = min(self._room, self._left + (now - self._at) * per_s)
        self._at = now
        if self._left < 1:
            message = f"This key may ask {rate:g} times a minute."
            wait = (1 - self._left) / per_s
            raise BusyError(message, retry_after_s=wait, code="rate_limit_exceeded")
        self._left -= 1
