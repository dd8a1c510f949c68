"""The bridge from engine threads to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass

from pipeline.types import Delta, Event


@dataclass(frozen=True)
class Stamped:
    """An event of one choice and when the engine delivered it (perf_counter, seconds)."""

    index: int
    event: Event
    at: float


class Channel:
    """Events of one HTTP request. `put` on any thread and never blocking, the rest on the loop.

    Waking a loop costs a system call, so it is woken once for all that waits; a `quiet` channel
    (nobody streams) is not woken for deltas. Bounded by the answers' length.
    """

    def __init__(self, *, quiet: bool = False):
        self._loop = asyncio.get_running_loop()
        self._quiet = quiet
        self._items: deque[Stamped] = deque()
        self._woken = False
        self._event = asyncio.Event()
        self.gone = False  # the client closed its connection

    def put(self, index: int, event: Event) -> None:
        self._items.append(Stamped(index, event, time.perf_counter()))
        if self._woken or (self._quiet and isinstance(event, Delta)):
            return
        self._woken = True
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._event.set)

    def hang_up(self) -> None:
        """The client has left. On the loop."""
        self.gone = True
        self._event.set()

    async def take(self, timeout_s: float | None = None) -> list[Stamped]:
        """All that waits, in order; empty after `timeout_s` or when the client left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        if not self.gone:
            self._event.clear()
        self._woken = False  # before emptying: what comes later rings again
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
