"""Who may use the engine's thread between rounds: one FIFO of work that is no request."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pipeline.errors import ClosedError

Work = Callable[[], Any]


class Ownership:
    """`exclusive` work holds admission and lets the active rows drain; `when_idle` work waits until
    nothing is active and never makes anybody else wait for that. Both run on the owner's thread, so
    nothing can start between the check for idleness and the work."""

    def __init__(self, wake: Callable[[], None]):
        self._wake = wake
        self._lock = threading.Lock()
        self._queue: deque[tuple[bool, Work, Future[Any]]] = deque()
        self._closed = False

    def exclusive(self, work: Work) -> Future[Any]:
        """Run `work` once the active rows have drained; nothing is admitted until it is done."""
        return self._add(True, work)

    def when_idle(self, work: Work) -> Future[Any]:
        """Run `work` when nothing is active."""
        return self._add(False, work)

    @property
    def holds_admission(self) -> bool:
        """True while exclusive work waits: the owner must not start new rows."""
        with self._lock:
            return any(exclusive for exclusive, _, _ in self._queue)

    def run_due(self) -> None:
        """Owner only, and only while nothing is active: run everything that waits, in order."""
        while (item := self._next()) is not None:
            _, work, future = item
            if future.set_running_or_notify_cancel():
                _settle(future, work)

    def close(self) -> None:
        """Refuse what waits and what comes."""
        with self._lock:
            self._closed = True
            waiting, self._queue = self._queue, deque()
        for _, _, future in waiting:
            future.set_exception(ClosedError("the engine has stopped"))

    def _add(self, exclusive: bool, work: Work) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the engine has stopped")
            self._queue.append((exclusive, work, future))
        self._wake()
        return future

    def _next(self) -> tuple[bool, Work, Future[Any]] | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None


def _settle(future: Future[Any], work: Work) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
