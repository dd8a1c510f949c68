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
            return any(exclusive and not future.cancelled() for exclusive, _, future in self._queue)

    def run_due(self, *, idle: bool) -> bool:
        """Owner only, and only while nothing is active: run the first that may run. `idle` says that
        no request waits either; without that only exclusive work goes before it. True if more waits."""
        item = self._next(idle)
        if item is not None and item[2].set_running_or_notify_cancel():
            _settle(item[2], item[1])
        with self._lock:
            return bool(self._queue)

    def close(self) -> None:
        """Refuse what waits and what comes."""
        with self._lock:
            self._closed = True
            waiting, self._queue = self._queue, deque()
        for _, _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the engine has stopped"))

    def _add(self, exclusive: bool, work: Work) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the engine has stopped")
            self._queue.append((exclusive, work, future))
        self._wake()
        return future

    def _next(self, idle: bool) -> tuple[bool, Work, Future[Any]] | None:
        with self._lock:
            may_run = (item for item in self._queue if idle or item[0])
            if (item := next(may_run, None)) is not None:
                self._queue.remove(item)
            return item


def _settle(future: Future[Any], work: Work) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
