"""Answers under way: what is kept of them, whose it is, and when it goes. Owner thread.

A capture is a state with a record, an attachment whose namespace is `resume/<key>/<attempt>`. The key
says which request it belongs to, the attempt who works on it, so that two equal requests in flight never
meet. Runs of tokens are shared with everybody, as any state's; the record, and what has a meaning at its
length alone, go with the attempt.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.types import State
from stages.tiers.radix import WORD, pack
from stages.tiers.saved.shelf import RECORD, File, key_of

if TYPE_CHECKING:
    from stages.tiers.disk import Disk
    from stages.tiers.saved.reading import Restore


class Attempt:
    """One go at an answer. While anybody refers to it, its captures are nobody else's to go on from."""

    def __init__(self, key: str, name: str):
        self.key, self.label = key, f"{RECORD}{key}/{name}"
        self.waiting: File | None = None  # the record that is being written
        self.claimed = False  # other servers know that somebody works on it


@dataclass
class Cleanup:
    """Files that must be gone before anything of their key may be restored."""

    names: set[str] = field(default_factory=set)
    done: Future[None] | None = None


class Attempts:
    """The disk tier's own; see `pipeline.types.Attempts`."""

    def __init__(self, disk: Disk):
        self.disk = disk
        self._live: weakref.WeakValueDictionary[str, Attempt] = weakref.WeakValueDictionary()
        self._cleanups: dict[str, Cleanup] = {}

    def begin(self, key: str) -> Attempt:
        return self._alive(Attempt(key, secrets.token_hex(8)))

    def _alive(self, attempt: Attempt) -> Attempt:
        self._live[attempt.label] = attempt
        weakref.finalize(attempt, self._let_go, attempt.label).atexit = False
        return attempt

    def _let_go(self, label: str) -> None:
        if self.disk.store.io is not None and label not in self._live:
            self.disk.store.io.submit(self.disk.store.claims.give, label)

    def left(self, key: str, tokens: Seq[int], namespace: str) -> Iterator[tuple[Attempt, Restore]]:
        """What attempts that have ended before their answer did left, furthest first. A state begins to
        be read when its turn comes, unless another server works on it. Nothing while a cleanup of this
        key is not done."""
        if not self._clean(key):
            return
        shelf, wanted, mine = self.disk.store.shelf, pack(tokens), ""
        for record in sorted(shelf.records.get(key, {}).values(), key=lambda file: -file.stop):
            free = record.label == mine or record.label not in self._live
            here = shelf.files.get(record.name) is record
            if not (here and free and self._follows(record, wanted)):
                continue
            reading = self.disk.reopen(record, namespace)
            if reading is not None:
                mine = record.label  # an attempt that was killed may have left two
                attempt = self._alive(Attempt(key, record.label.rpartition("/")[2]))
                attempt.claimed = True
                yield attempt, reading

    def _follows(self, record: File, key: bytes) -> bool:
        whole = record.runs[0].whole_key()
        return record.stop * WORD == len(whole) >= len(key) and whole.startswith(key)

    # --- captures

    def take(self, attempt: Attempt, state: State) -> bool:
        """Queue a capture, to be written while rows decode. False if it was dropped."""
        files = self.disk.place(state)
        record = next((f for f in files or () if f.label == attempt.label), None)
        if record is None:
            return False
        if not attempt.claimed and self.disk.store.io is not None:  # before it is written
            self.disk.store.io.submit(self.disk.store.claims.take, attempt.label)
            attempt.claimed = True
        path = [run.file for run in reversed(list(record.runs[0].chain()))]
        self.disk.queue.hurry([f for f in (*path, *self._belongings(record)) if f])
        attempt.waiting = record
        return True

    def under_way(self, attempt: Attempt) -> bool:
        """Whether its last capture is still to be written. One that is there takes the place of
        those before."""
        record = attempt.waiting
        if record is None:
            return False
        mine, held = self._belongings(record), self.disk.store.shelf.files
        if held.get(record.name) is record and any(file.state != "stored" for file in mine):
            return True
        attempt.waiting = None
        if held.get(record.name) is record:
            self._remove([file for file in self._records(attempt) if file is not record])
        return False

    def end(self, attempt: Attempt) -> None:
        """The answer is complete: from now on nothing of it is restored, written or not."""
        names = self._remove(self._records(attempt))
        self._live.pop(attempt.label, None)
        if names:
            self._sweep(attempt.key, names)

    def step(self) -> None:
        """While rows decode: one bounded piece of writing, and cleanups that are done are forgotten."""
        for key, cleanup in list(self._cleanups.items()):
            if cleanup.done and cleanup.done.done() and cleanup.done.exception() is None:
                del self._cleanups[key]
        self.disk.queue.step_soon()

    # --- what goes

    def _records(self, attempt: Attempt) -> list[File]:
        found = self.disk.store.shelf.records.get(attempt.key, {}).values()
        return [file for file in found if file.label == attempt.label]

    def _belongings(self, record: File) -> list[File]:
        """The record and what hangs at its length, where no other attempt stands there too."""
        extras = record.runs[0].extras.values() if record.runs else ()
        others = [f for f in extras if f is not record and f.kind in ("boundary", "attachment")]
        return [record] if any(key_of(f.label) for f in others) else [*others, record]

    def _remove(self, records: Seq[File]) -> set[str]:
        """Forget them at once and take them off the disk on the I/O thread; their names. What a state of
        somebody else needs stays."""
        mine = [file for record in records for file in self._belongings(record)[::-1]]
        gone = [file for file in mine if file in records or not file.wanted]
        for file in gone:
            self.disk.drop_soon(file)
        return {file.name for file in gone if file.state != "pending"}

    def _sweep(self, key: str, names: set[str]) -> None:
        """A cleanup takes over what an earlier one of its key has not managed. Files are named by what
        they hold: a name that is on the shelf again stays."""
        cleanup = self._cleanups.setdefault(key, Cleanup())
        cleanup.names = (cleanup.names | names) - self.disk.store.shelf.files.keys()
        cleanup.done = self.disk.store.erase_soon(sorted(cleanup.names))

    def _clean(self, key: str) -> bool:
        """Whether nothing of the key is left to be removed; what failed is tried again."""
        if (cleanup := self._cleanups.get(key)) is None:
            return True
        assert cleanup.done is not None
        if not cleanup.done.done():
            return False
        if (error := cleanup.done.exception()) is None:
            del self._cleanups[key]
            return True
        logging.getLogger(__name__).warning("captures of an ended answer stay: %s", error)
        self._sweep(key, set())
        return False
