"""Files of a folder and the shelf that knows them, kept in step. Owner thread, but for what `io` is given."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.identity import digest
from pipeline.types import LayerSpec
from stages.tiers.saved import format as form
from stages.tiers.saved.claims import Claims
from stages.tiers.saved.folder import Draft, Folder, Scan
from stages.tiers.saved.index import Index, Row
from stages.tiers.saved.payload import HostArray, rebuild
from stages.tiers.saved.shelf import File, Shelf
from stages.tiers.saved.survey import survey
from stages.tiers.saved.thread import IoThread

INDEX_ROOM = 1 << 16  # bytes by which one row may let the index grow
PATIENCE = 20  # a look at the whole folder costs at most one part in so many of the time


class NoRoomError(OSError):
    """Not under the cap, or not with the reserve left free."""


@dataclass
class Found:
    """What files say of themselves: name, row, size. `unread`: whether one could not be read just now."""

    rows: list[tuple[str, Row, int]] = field(default_factory=list)
    unread: bool = False


class Store:
    """One open folder. `cap` and `reserve` in bytes; `patience_s`: for other processes, and at the end
    for the disk."""

    def __init__(self, root: Path, cap: int, reserve: int, patience_s: float):
        self.folder, self.cap, self.reserve = Folder(root), cap, reserve
        self.patience_s = patience_s
        self.shelf, self.index = Shelf(), Index(root / "index")
        self.claims = Claims(root / "attempts")
        self.total = self.removed = self.evictions = 0
        self._index_bytes = 0  # of `total`
        self._strays: dict[str, int] = {}  # files of ours that stand on nothing we know
        self._certain: set[str] = set()  # those of them that a second look has found to be so
        self._unread = False  # whether a file could not be read just now: strays may stand on it
        self._next_scan = 0.0
        self._erasing: dict[
            str, Future[None]
        ] = {}  # names that a look at the folder may still find
        self._parted: deque[Future[Found]] = deque()  # what stood on dropped files
        self.io: IoThread | None = None

    # --- life

    def open(self, *, collect: bool = True) -> None:
        """OSError where the folder cannot be made or written to. `collect` removes what no prompt can
        reach and what is over the cap."""
        self.folder.make()
        self.claims.open()
        with self.folder.locked(self.patience_s):
            self.index.open()
            scan = self.folder.scan()
            self.folder.sweep(scan.temporary)
            self._take_rows(scan)
            self._look(scan)
            if collect and self._strays:
                self._look(self.folder.scan())
                self.remove_strays()
            self._restore_order()
            self._weigh(self.folder.scan())
            while collect and self.total > self.cap and self.evict_one():
                pass
        self.io = IoThread("headrace-disk")

    def close(self) -> None:
        self._parted.clear()
        self._erasing.clear()
        if self.io is not None:
            answers, self.io = self.io.close(self.patience_s), None
            if not answers:  # the index is on the same disk: who asks it may wait for ever
                self.shelf.clear()
                return
            files = self.shelf.files.items()
            self.index.set_uses({name: f.hits for name, f in files if f.state == "stored"})
        self.claims.close()
        self.index.close()
        self.shelf.clear()

    def _take_rows(self, scan: Scan) -> None:
        rows = sorted(self.index.rows(), key=lambda item: order(*item))
        gone = [name for name, _ in rows if name not in scan.sizes]
        self.index.delete(gone)
        for name, row in rows:
            if name in scan.sizes:
                self.shelf.place(name, row, scan.sizes[name])

    def _restore_order(self) -> None:
        """Who was used last before the previous end; what came later counts as newer."""
        uses = self.index.uses()
        for name, hits in uses.items():
            if file := self.shelf.files.get(name):
                file.hits = hits
                self.shelf.touch(file.runs[0])
                self.shelf.files.move_to_end(name, last=True)
        for name in [name for name in self.shelf.files if name not in uses]:
            self.shelf.touch(self.shelf.files[name].runs[0])

    # --- what others did

    def sync(self, *, force: bool = False) -> None:
        """Look at the folder: take in what other processes wrote, forget what they removed."""
        began = time.monotonic()
        if began < self._next_scan and not force:
            return
        self._erasing = self._unfinished()
        scan = self.folder.scan()
        self._weigh(scan)
        stored = [(n, f) for n, f in self.shelf.files.items() if f.state == "stored"]
        for name, file in stored:
            if name not in scan.sizes:
                self.drop(file)
        self._look(scan)
        self._next_scan = time.monotonic() + PATIENCE * (time.monotonic() - began)

    def _weigh(self, scan: Scan) -> None:
        self.total, self._index_bytes = scan.total, self.index.nbytes()

    def _look(self, scan: Scan) -> None:
        """Take in files that are not known. A scan takes time, in which others write: what stands on
        nothing in two of them does so for good, for a file is written after what it stands on."""
        before, self._strays, self._unread = self._strays, {}, False
        known = self.shelf.files.keys() | self._erasing.keys()
        self._adopt(name for name in scan.sizes if name not in known)
        self._certain = before.keys() & self._strays.keys()

    def _adopt(self, names: Iterable[str]) -> None:
        self._take_in(self._read_headers(names))

    def _read_headers(self, names: Iterable[str]) -> Found:
        """What can be placed; what is broken is removed. Any thread."""
        found = Found()
        for name in names:
            try:
                with form.open_plain(self.folder.path(name)) as file:
                    header, _, _ = form.read_header(file)
                    size = os.fstat(file.fileno()).st_size
                if header.name != name:
                    raise form.BadFileError("another file's name")
                found.rows.append((name, row_of(header), size))
            except form.BadFileError:
                self.folder.remove(name)
            except form.OtherFormatError:
                continue  # another version's
            except OSError as error:
                found.unread |= not isinstance(error, FileNotFoundError)
        return found

    def _take_in(self, found: Found) -> None:
        """Place files by their own headers; what stands on nothing waits."""
        self._unread |= found.unread
        for name, row, size in sorted(found.rows, key=lambda item: order(*item[:2])):
            if self.shelf.place(name, row, size):
                self.index.set({name: row})
            else:
                self._strays[name] = size

    def remove_strays(self) -> int:
        """Delete files of ours that no prompt can lead to; none while one that they may stand on
        cannot be read."""
        if self._unread:
            return 0
        gone, self._certain = self._certain & self._strays.keys(), set()
        for name in gone:
            self.folder.remove(name)
            self.total -= self._strays.pop(name)
        self.removed += len(gone)
        return len(gone)

    # --- room

    def begin(self, name: str, size: int) -> Draft:
        """Room for a file, and the file. LockedError at once if another process makes room just now;
        NoRoomError; OSError."""
        with self.folder.locked(0.0):
            self.sync()
            self._strays.pop(name, None)
            free, before = self.folder.free(), self._index_bytes
            self._index_bytes = self.index.nbytes()  # it grows between two looks at the folder
            self.total += self._index_bytes - before
            if size > self.cap:
                raise NoRoomError(f"{size} bytes are more than the cap of {self.cap}")
            if free - size < self.reserve and self.free() - size < self.reserve:
                raise NoRoomError(f"{free} bytes are free, {self.reserve} are to be left so")
            while self.total + size + INDEX_ROOM > self.cap or free - size < self.reserve:
                before = self.total
                if not self.evict_one():
                    raise NoRoomError(f"no room for {size} bytes: {free} are free")
                free += before - self.total
            draft = self.folder.begin(name, size)
            self.total += size
            return draft

    def free(self) -> int:
        """Bytes the disk has left for us, all that is ours removed."""
        ours = sum(file.size for file in self.shelf.files.values() if file.state == "stored")
        return self.folder.free() + ours

    def evict_one(self, *, soon: bool = False) -> bool:
        """Remove the least recently used file that nothing stands on."""
        if self._strays and not soon and self.remove_strays():
            return True
        files = self.shelf.files.values()
        victim = next((f for f in files if f.state == "stored" and self.shelf.free_to_go(f)), None)
        if victim is None:
            return False
        self.evictions += 1
        if soon:
            self.drop_soon(victim)
        else:
            self.drop(victim)
        return True

    def drop_soon(self, file: File) -> list[File]:
        """`drop` whose part with the disk is the I/O thread's: what stood on the file is gone until
        `take_back`."""
        gone = self.shelf.forget(file)
        stored = [each.name for each in gone if each.state == "stored"]
        if stored:
            assert self.io is not None
            bad = stored[: file.state == "stored"]
            self.total -= file.size * len(bad)
            self.erase_soon(bad)
            if rest := stored[len(bad) :]:
                self._parted.append(self.io.submit(self._part, rest))
        return gone

    def _part(self, names: list[str]) -> Found:
        self.index.delete(names)
        return self._read_headers(names)

    def take_back(self, wait_s: float = 0.0) -> None:
        """Take in again what stood on a dropped file and need not, once the I/O thread has looked."""
        while self._parted and (wait_s or self._parted[0].done()):
            part = self._parted.popleft()
            with contextlib.suppress(
                OSError, TimeoutError
            ):  # the next look at the folder will find it
                self._take_in(part.result(wait_s))

    def drop(self, file: File) -> list[File]:
        """Forget a file and all that stands on it, and remove it from the disk. Who stood on it finds
        another place if somebody else's file holds the same tokens, and is a stray if not."""
        gone = self.shelf.forget(file)
        stored = [each.name for each in gone if each.state == "stored"]
        self.index.delete(stored)
        if gone and file.state == "stored":
            self.total -= file.size
            self.folder.remove(file.name)
            stored.remove(file.name)
        if stored:
            self._adopt(stored)
        return [each for each in gone if each.name not in self.shelf.files]

    # --- the I/O thread

    def erase_soon(self, names: list[str]) -> Future[None]:
        """After all that was asked of the I/O thread before."""
        assert self.io is not None
        work = self.io.submit(self._erase, names)
        self._erasing = self._unfinished() | dict.fromkeys(names, work)
        return work

    def _unfinished(self) -> dict[str, Future[None]]:
        """What is still to be erased, or could not be."""
        return {
            name: work
            for name, work in self._erasing.items()
            if not work.done() or work.exception() is not None
        }

    def _erase(self, names: list[str]) -> None:
        """All of them that can be; OSError of the first that cannot."""
        faults: list[OSError] = []
        for name in names:
            try:
                self.folder.remove(name)
            except OSError as error:
                faults.append(error)
        self.index.delete(names)
        if faults:
            raise faults[0]

    def write_soon(self, header: form.Header, arrays: list[HostArray], size: int) -> Future[None]:
        """A file while rows decode: room by what is known, everything else on the I/O thread.
        NoRoomError, at once or from the future."""
        assert self.io is not None
        while self.total + size + INDEX_ROOM > self.cap:
            if size > self.cap or not self.evict_one(soon=True):
                raise NoRoomError(f"no room for {size} bytes under the cap of {self.cap}")
        self.total += size
        return self.io.submit(self._begin_and_write, header, arrays, size)

    def _begin_and_write(self, header: form.Header, arrays: list[HostArray], size: int) -> None:
        if (free := self.folder.free()) - size < self.reserve:
            raise NoRoomError(f"{free} bytes are free, {self.reserve} are to be left so")
        with self.folder.locked(self.patience_s):
            draft = self.folder.begin(header.name, size)
        self._write(draft, header, arrays)

    def write(self, draft: Draft, header: form.Header, arrays: list[HostArray]) -> Future[None]:
        assert self.io is not None
        return self.io.submit(self._write, draft, header, arrays)

    def _write(self, draft: Draft, header: form.Header, arrays: list[HostArray]) -> None:
        try:
            form.write(draft.file, header, arrays)
            self.folder.publish(draft)
        except BaseException:
            self.folder.discard(draft)
            raise
        self.index.set({header.name: row_of(header)})

    def read(self, name: str) -> tuple[form.Header, Any]:
        """Header and payload with host arrays, every checksum compared; BadFileError if anything about
        it is wrong. Any thread."""
        header, arrays = form.read_file(self.folder.path(name))
        if header.name != name:
            raise form.BadFileError("another file's name")
        try:
            return header, rebuild(header.structure, arrays)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise form.BadFileError(f"a payload that cannot be: {error!r}") from error

    # --- for tools

    def survey(self, shown: int) -> list[dict[str, Any]]:
        """Each namespace: files, tokens, bytes, prefixes that end by themselves, restores; and the
        `shown` most used of the prefixes."""
        return [
            {"namespace": name, **survey(tree.root, shown)}
            for (name, _), tree in self.shelf.trees.items()
        ]

    def verify(self) -> dict[str, str]:
        """Read every file; those that are not what they should be, with the reason, are removed."""
        bad: dict[str, str] = {}
        for name, file in list(self.shelf.files.items()):
            try:
                self.read(name)
            except form.BadFileError as error:
                bad[name] = str(error)
                self.drop(file)
            except OSError as error:
                bad[name] = f"kept, but cannot be read just now: {error}"
        return bad

    def clear(self) -> None:
        for file in list(self.shelf.files.values()):
            if file.state == "stored":
                self.drop(file)
        self.shelf.clear()


def order(name: str, row: Row) -> tuple[int, bool, str]:
    """Of placing: a file comes after what it stands on."""
    return row.start, row.kind != "run", name


def specs_digest(specs: Iterable[LayerSpec]) -> str:
    return digest({"specs": [asdict(spec) for spec in specs]})


def row_of(header: form.Header) -> Row:
    """`cuttable` is the header's word on whether its layers can be cut at any length."""
    return Row.of(header, specs_digest(header.specs), header.cuttable)


def complain(what: str, error: BaseException) -> None:
    logging.getLogger(__name__).warning("saved states: %s: %s", what, error)
