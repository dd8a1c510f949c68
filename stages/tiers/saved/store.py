"""Files of a folder and the shelf that knows them, kept in step. Owner thread, but for `write` and `read`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.identity import digest
from pipeline.types import LayerSpec
from stages.tiers.saved import format as form
from stages.tiers.saved.folder import Draft, Folder, Scan
from stages.tiers.saved.index import Index, Row
from stages.tiers.saved.payload import HostArray, rebuild
from stages.tiers.saved.shelf import File, Shelf

PATIENCE = 20  # a look at the whole folder costs at most one part in so many of the time


class NoRoomError(OSError):
    """Not under the cap, or not with the reserve left free."""


class Store:
    """One open folder. `cap` and `reserve` in bytes."""

    def __init__(self, root: Path, cap: int, reserve: int):
        self.folder, self.cap, self.reserve = Folder(root), cap, reserve
        self.shelf, self.index = Shelf(), Index(root / "index")
        self.total = self.adopted = self.removed = self.evictions = 0
        self._strays: dict[str, int] = {}  # files of ours that stand on nothing we know
        self._next_scan = 0.0
        self._io: ThreadPoolExecutor | None = None

    # --- life

    def open(self, *, collect: bool = True) -> None:
        """OSError where the folder cannot be made or written to. `collect` removes what no prompt can
        reach and what is over the cap."""
        self.folder.make()
        with self.folder.locked():
            self.index.open()
            scan = self.folder.scan()
            self.folder.sweep(scan.temporary)
            self._take_rows(scan)
            self._adopt(name for name in scan.sizes if name not in self.shelf.files)
            if collect:
                self.remove_strays()
            self._restore_order()
            self.total = self.folder.scan().total
            while collect and self.total > self.cap and self.evict_one():
                pass
        self._io = ThreadPoolExecutor(1, "headrace-disk")

    def close(self) -> None:
        if self._io is not None:
            self._io.shutdown(wait=True)
            self._io = None
            stored = [name for name, file in self.shelf.files.items() if file.state == "stored"]
            self.index.set_order(stored)
        self.index.close()
        self.shelf.clear()

    def _take_rows(self, scan: Scan) -> None:
        rows = sorted(self.index.rows(), key=lambda item: (item[1].start, item[1].kind != "run"))
        gone = [name for name, _ in rows if name not in scan.sizes]
        self.index.delete(gone)
        for name, row in rows:
            if name in scan.sizes:
                self.shelf.place(name, row, scan.sizes[name])

    def _restore_order(self) -> None:
        """Who was used last before the previous end; what came later counts as newer."""
        for name in self.index.order():
            if file := self.shelf.files.get(name):
                self.shelf.touch(file.runs[0])
                self.shelf.files.move_to_end(name, last=True)
        known = set(self.index.order())
        for name in [name for name in self.shelf.files if name not in known]:
            self.shelf.touch(self.shelf.files[name].runs[0])

    # --- what others did

    def sync(self, *, force: bool = False) -> None:
        """Look at the folder: take in what other processes wrote, forget what they removed."""
        began = time.monotonic()
        if began < self._next_scan and not force:
            return
        scan = self.folder.scan()
        self.total = scan.total
        stored = [(n, f) for n, f in self.shelf.files.items() if f.state == "stored"]
        for name, file in stored:
            if name not in scan.sizes:
                self.drop(file)
        self._strays = {n: s for n, s in self._strays.items() if n in scan.sizes}
        self._adopt(n for n in scan.sizes if n not in self.shelf.files and n not in self._strays)
        self._next_scan = time.monotonic() + PATIENCE * (time.monotonic() - began)

    def _adopt(self, names: Iterable[str]) -> None:
        """Place files by their own headers; what is broken is removed, what stands on nothing waits."""
        found = []
        for name in names:
            try:
                with form.open_plain(self.folder.path(name)) as file:
                    header, _, _ = form.read_header(file)
                if header.name != name:
                    raise form.BadFileError("another file's name")
                found.append((header.start, header.kind != "run", name, row_of(header)))
            except form.BadFileError:
                self.folder.remove(name)
            except (form.OtherFormatError, OSError):
                continue  # another version's, or not to be read just now
        for _, _, name, row in sorted(found, key=lambda item: item[:3]):
            size = self.folder.path(name).stat().st_size
            if self.shelf.place(name, row, size):
                self.adopted += 1
                self.index.set({name: row})
            else:
                self._strays[name] = size

    def remove_strays(self) -> int:
        """Delete files of ours that no prompt can lead to."""
        strays, self._strays = self._strays, {}
        for name, size in strays.items():
            self.folder.remove(name)
            self.total -= size
        self.removed += len(strays)
        return len(strays)

    # --- room

    def begin(self, name: str, size: int) -> Draft:
        """Room for a file, and the file. NoRoomError; OSError."""
        with self.folder.locked():
            self.sync()
            free = self.folder.free()
            if size > self.cap:
                raise NoRoomError(f"{size} bytes are more than the cap of {self.cap}")
            if free - size < self.reserve and free + self._own() - size < self.reserve:
                raise NoRoomError(f"{free} bytes are free, {self.reserve} are to be left so")
            while self.total + size > self.cap or free - size < self.reserve:
                before = self.total
                if not self.evict_one():
                    raise NoRoomError(f"no room for {size} bytes: {free} are free")
                free += before - self.total
            draft = self.folder.begin(name, size)
            self.total += size
            return draft

    def _own(self) -> int:
        """Bytes that could be freed by removing all that is ours."""
        return sum(file.size for file in self.shelf.files.values() if file.state == "stored")

    def evict_one(self) -> bool:
        """Remove the least recently used file that nothing stands on."""
        if self._strays:
            return bool(self.remove_strays())
        files = self.shelf.files.values()
        victim = next((f for f in files if f.state == "stored" and self.shelf.free_to_go(f)), None)
        if victim is None:
            return False
        self.evictions += 1
        self.drop(victim)
        return True

    def drop(self, file: File) -> list[File]:
        """Forget a file and all that stands on it, and remove what is on the disk of them."""
        gone = self.shelf.forget(file)
        stored = [each for each in gone if each.state == "stored"]
        for each in reversed(stored):
            self.total -= each.size
            self.folder.remove(each.name)
        self.index.delete(each.name for each in stored)
        return gone

    # --- the I/O thread

    def write(self, draft: Draft, header: form.Header, arrays: list[HostArray]) -> Future[None]:
        assert self._io is not None
        return self._io.submit(self._write, draft, header, arrays)

    def _write(self, draft: Draft, header: form.Header, arrays: list[HostArray]) -> None:
        try:
            form.write(draft.file, header, arrays)
            self.folder.publish(draft)
        except BaseException:
            self.folder.discard(draft)
            raise
        self.index.set({header.name: row_of(header)})

    def read(self, name: str) -> Future[tuple[form.Header, Any]]:
        """Header and payload with host arrays; BadFileError if anything about it is wrong."""
        assert self._io is not None
        return self._io.submit(self._read, name)

    def _read(self, name: str) -> tuple[form.Header, Any]:
        header, arrays = form.read_file(self.folder.path(name))
        try:
            return header, rebuild(header.structure, arrays)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise form.BadFileError(f"a payload that cannot be: {error!r}") from error

    # --- for tools

    def survey(self) -> list[dict[str, Any]]:
        """Files, tokens and bytes of each namespace."""
        told = []
        for (namespace, _), tree in self.shelf.trees.items():
            runs = [run for run in tree.root.below() if run.file is not None]
            files = {f.name: f for run in runs for f in (run.file, *run.extras.values()) if f}
            tokens, size = sum(r.stop - r.start for r in runs), sum(f.size for f in files.values())
            told.append(
                {"namespace": namespace, "files": len(files), "tokens": tokens, "bytes": size}
            )
        return told

    def verify(self) -> dict[str, str]:
        """Read every file; those that are not what they should be, with the reason, are removed."""
        bad: dict[str, str] = {}
        for name, file in list(self.shelf.files.items()):
            try:
                header, _ = self._read(name)
                if header.name != name:
                    raise form.BadFileError("another file's name")
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


def specs_digest(specs: Iterable[LayerSpec]) -> str:
    return digest({"specs": [asdict(spec) for spec in specs]})


def row_of(header: form.Header) -> Row:
    """`cuttable` is the header's word on whether its layers can be cut at any length."""
    return Row.of(header, specs_digest(header.specs), header.cuttable)


def complain(what: str, error: BaseException) -> None:
    logging.getLogger(__name__).warning("saved states: %s: %s", what, error)
