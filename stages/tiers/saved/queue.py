"""What waits to be written: readable meanwhile, bounded in bytes. Owner thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from stages.rows.state import payload_bytes
from stages.tiers.saved import format as form
from stages.tiers.saved.folder import LockedError
from stages.tiers.saved.payload import flatten, to_host
from stages.tiers.saved.shelf import File
from stages.tiers.saved.store import Store

FLIGHTS = 16  # files that the I/O thread may have before it while rows decode
BURST_S = 0.05  # what has not been written for so long may be caught up on at once


class Queue:
    """Files of a store that are not written yet, oldest first; at most `most` bytes of them.
    `patience_s`: how long another process may hold the folder. `give_up` forgets one and all that
    stands on it; `failed` is told why a write went wrong."""

    def __init__(
        self,
        store: Store,
        most: int,
        patience_s: float,
        give_up: Callable[[File], None],
        failed: Callable[[File, BaseException], None],
        rate: float,
    ):
        self.store, self.patience_s, self.give_up, self.failed = store, patience_s, give_up, failed
        self.most = self.cap = most
        self.rate = rate  # bytes a second while rows decode
        self.rests_until = 0.0  # monotonic seconds; until then nothing is written beside rows
        self._hurried: dict[str, File] = {}  # to be written even while rows decode
        self.files: dict[str, File] = {}
        self.written_files = self.written_bytes = 0
        self._flights: deque[tuple[File, Future[None]]] = deque()  # in the order of writing
        self._locked_since: float | None = None  # monotonic; another process holds the folder

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def add(self, file: File) -> None:
        """A file whose payload is still on the device."""
        file.size = payload_bytes(file.payload[1])
        self.files[file.name] = file

    def shrink(self, nbytes: int) -> None:
        """Hold at most `nbytes` from now on, and never more than `most`."""
        self.cap = max(0, min(self.most, nbytes))
        self.shed(())

    def shed(self, fresh: Collection[File]) -> None:
        """Give up the oldest that may go while there are too many bytes. What came now stays, so that
        one state larger than `most` can still be written, unless memory is short."""
        fresh = fresh if self.cap == self.most else ()
        while self.nbytes > self.cap:
            old = (f for f in self.files.values() if f.state == "pending" and f not in fresh)
            victim = next((f for f in old if self.store.shelf.free_to_go(f)), None)
            if victim is None:
                return
            self.give_up(victim)

    def hurry(self, files: Iterable[File]) -> None:
        """Write those of them that wait, in this order, without waiting until nothing runs."""
        self._hurried |= {file.name: file for file in files if file.name in self.files}

    def step_soon(self) -> None:
        """While rows decode: look after the files in flight, then begin those that are in a hurry, as
        many as the rate allows."""
        self.settle(wait_s=0.0)
        while self._hurried and len(self._flights) < FLIGHTS:
            if (now := time.monotonic()) < self.rests_until:
                return
            file = self._hurried.pop(next(iter(self._hurried)))
            if self.files.get(file.name) is file and file.state == "pending":
                self.rests_until = max(now - BURST_S, self.rests_until) + file.size / self.rate
                self._start(file, soon=True)

    def step(self) -> bool:
        """Look after the file in flight, or begin the next; True if more is left."""
        if not self.settle(wait_s=0.0):
            return True
        file = next(iter(self.files.values()), None)
        if file is None:
            return False
        if self.store.shelf.files.get(file.name) is not file:
            del self.files[file.name]  # what it stands on is gone
            return True
        self._start(file)
        return True

    def _start(self, file: File, *, soon: bool = False) -> None:
        try:
            self._begin(file, soon)
            self._locked_since = None
        except LockedError as error:
            self._wait_for_lock(file, error)
        except Exception as error:  # one that cannot be written must not hold up those behind it
            self.failed(file, error)

    def _wait_for_lock(self, file: File, error: LockedError) -> None:
        now = time.monotonic()
        self._locked_since = self._locked_since or now
        if now - self._locked_since > self.patience_s:
            self._locked_since = None
            self.failed(file, error)

    def _begin(self, file: File, soon: bool) -> None:
        header, payload = file.payload
        arrays: list[Any] = []
        header = replace(header, structure=flatten(payload, arrays))
        hosts = to_host(arrays)
        size = form.file_size(header, hosts)
        file.state = "writing"
        try:
            if soon:
                future = self.store.write_soon(header, hosts, size)
            else:
                future = self.store.write(self.store.begin(file.name, size), header, hosts)
        except BaseException:
            file.state = "pending"
            raise
        file.size = size
        self._flights.append((file, future))

    def settle(self, wait_s: float) -> bool:
        """True once no write is in flight; `wait_s` for each."""
        while self._flights:
            file, future = self._flights[0]
            try:
                error = future.exception(wait_s)
            except TimeoutError:
                return False
            self._flights.popleft()
            self._landed(file, error)
        return True

    def _landed(self, file: File, error: BaseException | None) -> None:
        if error is not None:
            file.state = "pending"
            self.store.total -= file.size  # there is nothing of it
            self.failed(file, error)
        elif self.store.shelf.files.get(file.name) is file:
            file.state, file.payload = "stored", None
            self.files.pop(file.name, None)
            self.written_files += 1
            self.written_bytes += file.size
        else:
            self._forget(file)

    def _forget(self, file: File) -> None:
        """It was given up while it was written; another one of its name may wait or be stored."""
        if self.files.get(file.name) is file:
            del self.files[file.name]
        if file.name not in self.store.shelf.files:
            self.store.folder.remove(file.name)
            self.store.total -= file.size
