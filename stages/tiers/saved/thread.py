"""The one thread that reads and writes saved files."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")


class IoThread:
    """Runs work one piece after another. A disk that is gone may never answer, so nobody waits for this
    thread longer than they say, not even the process at its end."""

    def __init__(self, name: str):
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((future, lambda: work(*arguments)))
        return future

    def close(self, wait_s: float) -> bool:
        """No more work; True if all that was submitted is done within `wait_s`."""
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, work  # what was read belongs to who asked
        mx.clear_streams()  # left to the thread's end they abort the process now and then
