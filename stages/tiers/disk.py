"""Saved states on disk: what was computed once is there after a restart.

A put is queued in memory and readable at once; `idle_step` writes one file at a time on a thread of
its own. What is asked for and cannot be had, whatever the reason, is a miss.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError, below, refuse
from pipeline.types import KVPolicy, State, Target
from pipeline.types.places import user_path
from stages.rows.state import check
from stages.tiers.radix import WORD, pack, unpack
from stages.tiers.saved import contents
from stages.tiers.saved import format as form
from stages.tiers.saved.attempts import Attempts
from stages.tiers.saved.queue import Queue
from stages.tiers.saved.reading import Loan, Outcome, Restore, pieces_of, restore
from stages.tiers.saved.shelf import File, Run, key_of, slot
from stages.tiers.saved.store import Store, complain, row_of

SMALLEST = 1 << 20  # bytes; the index alone takes some

RETRY_S = 0.5  # after a read that failed for no fault of the file


@dataclass
class Counters:
    """Plain numbers, so that another thread may read them."""

    files: int = 0
    tokens: int = 0
    bytes: int = 0  # of everything in the folder
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    written_files: int = 0
    written_bytes: int = 0
    evictions: int = 0
    dropped: int = 0  # states or files that were given up before they were written
    failed: int = 0  # writes that went wrong
    corrupt: int = 0  # files that were not what they should be
    pending: int = 0  # files not yet written
    pending_bytes: int = 0
    memory_bytes: int = 0
    read_s: float = 0.0  # of the last restore
    entries: int = 0


class Disk:
    """Keeps states in a folder (protocol Tier). Sizes in 10^9 bytes; `path` None: the user's cache.

    `max_gb` bounds everything in the folder, `reserve_gb` is left free on the disk, `queue_gb` is what may
    wait in memory to be written. What a longer prompt shares with a shorter one is stored once.
    """

    name = "disk"
    can = frozenset({"durable", "fetch", "resume", "shrink"})

    def __init__(
        self,
        target: Target,
        kv: KVPolicy,
        *,
        path: str | None = None,
        max_gb: float = 20.0,
        segment_tokens: int = 512,
        reserve_gb: float = 2.0,
        queue_gb: float = 1.0,
        timeout_s: float = 10.0,
        capture_mb_s: float = 64.0,
    ):
        enough = SMALLEST / 1e9 <= max_gb < float("inf")
        refuse(
            max_gb="" if enough else f"wants at least {SMALLEST / 1e9} (1 MiB), got {max_gb}",
            segment_tokens=below(segment_tokens, 1),
            reserve_gb=below(reserve_gb, 0),
            queue_gb=below(queue_gb, 0),
            timeout_s=below(timeout_s, 0.01),
            capture_mb_s=below(capture_mb_s, 0.1),
        )
        self.target, self.kv = target, kv
        self.root = user_path(path) if path else default_path()
        self.cap = round(max_gb * 1e9)
        self.segment_tokens, self.timeout_s = segment_tokens, timeout_s
        self.store = Store(self.root, self.cap, round(reserve_gb * 1e9), timeout_s)
        most, rate = round(queue_gb * 1e9), capture_mb_s * 1e6
        self.queue = Queue(self.store, most, timeout_s, self._lost, self._failed, rate)
        self.attempts = Attempts(self)
        self._rests_until = 0.0  # monotonic seconds
        self._stuck: Future[Any] | None = None  # a read that took too long
        self._told: set[str] = set()
        self._count = Counters()

    def open(self) -> None:
        """OpenError naming the path and the reason."""
        least = self.kv.bytes_per_token(self.target) * self.segment_tokens
        if least > self.cap:
            raise OpenError(
                f"tier.disk.max_gb: {self.cap / 1e9:g} holds less than one segment of "
                f"{self.segment_tokens} tokens ({least / 1e9:g}). Raise it, or lower segment_tokens."
            )
        self.mount()
        free = self.store.free()
        if free - least < self.store.reserve:
            self.close()
            raise OpenError(
                f"tier.disk.reserve_gb: {free / 1e9:.3g} are free for {self.root}, what is saved there "
                f"counted, and {self.store.reserve / 1e9:g} are to be left so: nothing could be written. "
                "Make room, lower it, or leave the tier out: 'tier=[ram]'"
            )

    def mount(self, *, collect: bool = True) -> None:
        """Open the folder; all that tools need which look at it without a model."""
        try:
            self.store.open(collect=collect)
        except OSError as error:
            raise OpenError(
                f"tier.disk.path: {self.root} cannot be used: {error.strerror or error}. "
                "Choose another folder, or leave the tier out: 'tier=[ram]'"
            ) from error
        self._account()

    def close(self) -> None:
        self.queue.settle(wait_s=self.timeout_s)
        self.queue.files.clear()
        self.store.close()

    # --- looking

    def usable(self, tokens: Seq[int], namespace: str, limit: int) -> int:
        """How many tokens `lookup` would find, from memory alone. 0 while a read hangs, and for a moment
        after one that failed."""
        if self._stuck is not None and not self._stuck.done():
            return 0
        if time.monotonic() < self._rests_until:
            return 0
        self._stuck = None
        self.store.take_back()
        return self._best(pack(tokens[: max(0, limit)]), namespace)[0]

    def fetch(self, tokens: Seq[int], namespace: str, limit: int) -> Restore | None:
        """Begin to read the longest usable state of at most `limit` of these tokens."""
        length = self.usable(tokens, namespace, limit)
        if not length:
            self._count.misses += 1
            return None
        _, path = self._best(pack(tokens[:length]), namespace)
        return self._read(path, tuple(tokens[:length]), namespace)

    def reopen(self, record: File, namespace: str) -> Restore | None:
        """Begin to read the state that a record of an answer under way hangs at, with the record; nothing
        comes of it where another server works on that answer."""
        tokens = unpack(record.runs[0].whole_key())
        if self.usable(tokens, namespace, len(tokens)) < len(tokens):
            return None
        _, path = self._best(pack(tokens), namespace)
        return self._read(path, tokens, namespace, record)

    def _read(
        self, path: list[Run], tokens: tuple[int, ...], namespace: str, record: File | None = None
    ) -> Restore:
        wanted = pieces_of(path, len(tokens), namespace, record)
        least = max(run.min_reuse for run in path)
        assert self.store.io is not None
        label = record.label if record is not None else ""
        work = self.store.io.submit(self._restored, label, wanted, tokens, namespace, least)
        until = time.monotonic() + self.timeout_s
        return Restore(work, until, self._settle, path[-1], len(tokens))

    def _restored(self, label: str, *what: Any) -> Outcome:
        """On the I/O thread."""
        if label and not self.store.claims.take(label):
            return Outcome()
        return restore(self.store.read, *what)

    def lookup(self, tokens: Seq[int], namespace: str, limit: int) -> Loan | None:
        """The longest usable state of at most `limit` of these tokens, waited for."""
        while (reading := self.fetch(tokens, namespace, limit)) is not None:
            reading.wait()
            if (match := reading.take()) is not None:
                return match
            self.store.take_back(self.timeout_s)
        return None

    def covered(self, tokens: Seq[int], namespace: str, min_reuse: int = 0) -> int:
        """Where a capture of these tokens may begin, as of RAM."""
        tree = self.store.shelf.trees.get((namespace, min_reuse > 0))
        if tree is None:
            return 0
        path, held = tree.walk(pack(tokens))
        whole = held == len(tokens) and tree.usable(path, held) == held
        return held if whole else min(held, len(tokens) - 1)

    def durable(self, tokens: Seq[int], namespace: str) -> bool:
        """Whether exactly these tokens can be restored from what is written."""
        length, path = self._best(pack(tokens), namespace)
        if length < len(tokens):
            return False
        files = [run.file for run in path] + list(path[-1].extras.values())
        return all(file is not None and file.state == "stored" for file in files)

    def _best(self, key: bytes, namespace: str) -> tuple[int, list[Run]]:
        found = []
        for tree in self.store.shelf.of(namespace):
            path, held = tree.walk(key)
            length = tree.usable(path, held)
            found.append((length, [run for run in path if run.start < length]))
        return max(found, key=lambda pair: pair[0], default=(0, []))

    # --- restoring

    def _settle(self, restore: Restore) -> State | None:
        """Take what was read; what was wrong is forgotten."""
        if not restore.work.done():
            self._stuck = restore.work
            self._tell(
                "a read takes too long, the disk is left alone until it ends", TimeoutError()
            )
            return None
        try:
            outcome = restore.work.result()
        except Exception as error:  # the arrays could not be made
            self._tell("a state could not be restored", error)
            self._rests_until = time.monotonic() + RETRY_S
            return None
        for file, fault in outcome.faults:
            self._bad(file, fault)
        if outcome.state is not None:
            self._used(restore)
        return outcome.state

    def _used(self, restore: Restore) -> None:
        self.store.shelf.touch(restore.last)
        if restore.last.file is not None:
            restore.last.file.hits += 1
        self._count.hits += 1
        self._count.reused_tokens += restore.length
        self._count.read_s = time.monotonic() - restore.began

    def _bad(self, file: File, error: BaseException) -> None:
        """A file that cannot be had, said once a kind. One that is wrong or gone is forgotten with all
        that stands on it; one that cannot be read just now stays."""
        self._count.corrupt += isinstance(error, form.BadFileError)
        self._tell(f"{file.name} cannot be read", error)
        if isinstance(error, form.BadFileError | form.OtherFormatError | FileNotFoundError):
            self._lost(file)
        else:
            self._rests_until = time.monotonic() + RETRY_S

    def _lost(self, file: File) -> None:
        """Forgotten, with all that stands on it."""
        self._count.dropped += self.drop_soon(file)

    def drop_soon(self, file: File) -> int:
        """Nobody wants it any more; the disk's part is the I/O thread's. How many were yet to be written."""
        gone = self.store.drop_soon(file)
        waited = [self.queue.files.pop(each.name, None) for each in gone]
        self._account()
        return sum(each is not None for each in waited)

    def _tell(self, what: str, error: BaseException) -> None:
        kind = f"{type(error).__name__} {getattr(error, 'strerror', '')}"
        if kind not in self._told:
            self._told.add(kind)
            complain(what, error)

    # --- taking

    def put(self, state: State) -> bool:
        """Queue what is not held yet. False if it was dropped: what comes before it is not here, or
        the queue has no room."""
        return self.place(state) is not None or self._drop()

    def place(self, state: State) -> list[File] | None:
        """What is new of a state, now in the queue; None if it cannot be had."""
        check(state)
        key = pack(state.tokens)
        tree = self.store.shelf.trees.get((state.namespace, state.min_reuse > 0))
        held = tree.walk(key)[1] if tree else 0
        if not state.tokens or held < state.segments[0].start:
            return None
        files = []
        under_way = any(key_of(note.namespace) for note in state.attachments)
        parent = self._parent(state, key, held)
        for header, payload in contents.files(state, key, held, parent, self.segment_tokens):
            if header.kind == "attachment":
                self._replace(header, payload)
            file = self.store.shelf.place(header.name, row_of(header), 0, (header, payload))
            if file is not None:
                file.wanted = not under_way
                self.queue.add(file)
                files.append(file)
        path, _ = self.store.shelf.trees[state.namespace, state.min_reuse > 0].walk(key)
        self.store.shelf.touch(path[-1])
        if not under_way and path[-1].stop == len(state.tokens):
            for extra in path[-1].extras.values():
                extra.wanted = True
        self.queue.shed(files)
        self._account()
        return files if all(file.name in self.queue.files for file in files) else None

    def _parent(self, state: State, key: bytes, held: int) -> str:
        """Name of the file that holds the last held token."""
        tree = self.store.shelf.trees.get((state.namespace, state.min_reuse > 0))
        path = tree.walk(key[: held * WORD])[0] if tree and held else []
        return path[-1].file.name if path and path[-1].file else ""

    def _replace(self, header: form.Header, payload: Any) -> None:
        """A newer attachment of the same drafter takes the older one's place, if it differs."""
        old = self.store.shelf.files.get(header.name)
        if old is None or old.state == "writing":
            return
        if old.payload is not None and not contents.same_attachment(old.payload[1], payload):
            self._lost(old)

    def _drop(self) -> bool:
        self._count.dropped += 1
        return False

    # --- writing

    def idle_step(self) -> bool:
        """Look after the write in flight, or begin the next; True if more is left."""
        more = self.queue.step()
        self._account()
        return more

    def wait(self, seconds: float) -> None:
        """Let the write in flight go on for at most this long."""
        self.queue.settle(wait_s=seconds)
        self._account()

    def _failed(self, file: File, error: BaseException) -> None:
        self._count.failed += 1
        self._tell("a state could not be written", error)
        self._lost(file)

    # --- books

    def shrink(self, nbytes: int) -> int:
        """Let at most `nbytes` of memory wait to be written from now on."""
        self.queue.shrink(nbytes)
        self._account()
        return self.queue.cap

    def clear(self) -> None:
        """Forget everything and remove our files."""
        self.queue.settle(wait_s=self.timeout_s)
        self.queue.files.clear()
        self.store.clear()
        self._account()

    def stats(self) -> Mapping[str, int | float]:
        return {**vars(self._count), "cap_bytes": self.cap}

    def _account(self) -> None:
        count, shelf, queue = self._count, self.store.shelf, self.queue
        count.files = count.entries = len(shelf.files) - len(self.queue.files)
        count.tokens, count.bytes = shelf.tokens, self.store.total
        count.evictions, count.pending = self.store.evictions, len(self.queue.files)
        count.pending_bytes = count.memory_bytes = queue.nbytes
        count.written_files, count.written_bytes = queue.written_files, queue.written_bytes

    def check_integrity(self) -> None:
        """Recount everything. AssertionError with the numbers."""
        self.store.shelf.check()
        files = self.store.shelf.files
        waiting = {name for name, file in files.items() if file.state != "stored"}
        assert waiting == set(self.queue.files), (
            f"{len(waiting)} wait, {len(self.queue.files)} in the queue"
        )
        held = all((file.payload is None) == (file.state == "stored") for file in files.values())
        assert held, "a stored file keeps its arrays, or a pending one has none"
        assert all(slot(file) in run.extras for file in files.values() if file.kind != "run"
                   for run in file.runs), "a file hangs nowhere"  # fmt: skip


def default_path() -> Path:
    """`$XDG_CACHE_HOME/headrace/saved`, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "saved"
