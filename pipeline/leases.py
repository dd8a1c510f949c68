"""Leases: somebody else's work that must not run beside ours (another process on the accelerator, say)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from pipeline.ownership import Ownership

State = Literal["waiting", "held", "over"]
LOOK_S = 0.1  # how soon a lease notices that the engine is to stop


class Leases:
    """Each is exclusive work that does nothing: rows that run drain first, new ones wait until it is
    released, and so do the leases behind it. A draining or closing engine takes them back. Any thread.
    `lent` is asked on the engine's thread, again and again while one is held: whether it may be."""

    def __init__(self, ownership: Ownership, lent: Callable[[], bool]):
        self._ownership, self._lent = ownership, lent
        self._open: dict[str, tuple[threading.Event, Future[Any]]] = {}

    def take(self, name: str) -> None:
        """Ask for one, under a new name. ClosedError if the engine has stopped."""
        released = threading.Event()
        self._open[name] = released, self._ownership.exclusive(lambda: self._hold(released))

    def state(self, name: str) -> State:
        """`over` too for names that nobody knows."""
        if name not in self._open:
            return "over"
        _, future = self._open[name]
        if future.done():
            return "over"
        return "held" if future.running() else "waiting"

    def release(self, name: str) -> None:
        """Give it back, or up while it waits; may be called twice."""
        if lease := self._open.pop(name, None):
            released, future = lease
            released.set()
            future.cancel()

    def _hold(self, released: threading.Event) -> None:
        while self._lent() and not released.wait(LOOK_S):
            pass
