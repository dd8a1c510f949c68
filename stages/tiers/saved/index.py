"""What is in the folder, so that a start need not read a header of each file: diskcache, disarmed.

The index is a convenience. What it lacks is read from the files' headers, what it says wrongly is
found out when the file is read, and where it is broken it is made anew. So nothing in it is trusted:
rows are JSON texts, and diskcache's pickling and its value files are refused on every path, for
both can be made to run code or to read and delete files anywhere (CVE-2025-69872).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diskcache

from stages.tiers.saved.folder import NAME
from stages.tiers.saved.format import KINDS, Header

USES = "uses"
PATIENCE_S = 1.0  # how long a row waits for another process's transaction
BROKEN = (
    diskcache.Timeout, sqlite3.Error, OSError, ValueError, TypeError, AttributeError, RecursionError,
)  # fmt: skip


class Refused(ValueError):
    """A row that only a pickle or a file could hold."""


class TextRows(diskcache.Disk):
    """Keys and values are text in the database itself; nothing else goes in or comes out."""

    def put(self, key: Any) -> tuple[str, bool]:
        if type(key) is not str:
            raise Refused("keys are text")
        return key, True

    def get(self, key: Any, raw: Any) -> str:
        if not raw or type(key) is not str:
            raise Refused("a key that is no text")
        return key

    def store(self, value: Any, read: bool, key: Any = None) -> tuple[int, int, None, str]:
        if read or type(value) is not str:
            raise Refused("values are text")
        return 0, diskcache.core.MODE_RAW, None, value

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> str:
        if mode != diskcache.core.MODE_RAW or filename is not None or type(value) is not str:
            raise Refused("a value that is no text")
        return value

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        raise Refused("values have no files")

    def remove(self, file_path: str) -> None:
        """Nothing: no row of ours has a file, so whatever is named here is somebody else's."""


@dataclass(frozen=True)
class Row:
    """What a start needs to know of one file."""

    kind: str
    namespace: str
    parent: str
    start: int
    stop: int
    key: bytes
    specs: str  # digest of the layers
    cuttable: bool
    min_reuse: int = 0
    label: str = ""

    @classmethod
    def of(cls, header: Header, specs: str, cuttable: bool) -> Row:
        h = header
        return cls(
            h.kind, h.namespace, h.parent, h.start, h.stop, h.key, specs, cuttable, h.min_reuse,
            h.label,
        )  # fmt: skip

    def as_text(self) -> str:
        return json.dumps({**vars(self), "key": base64.b64encode(self.key).decode()})

    @classmethod
    def from_text(cls, text: str) -> Row:
        """ValueError or the like for anything else."""
        fields = json.loads(text)
        fields["key"] = base64.b64decode(fields["key"], validate=True)
        row = cls(**fields)
        kinds = {
            "kind": str, "namespace": str, "parent": str, "start": int, "stop": int, "specs": str,
            "cuttable": bool, "min_reuse": int, "label": str,
        }  # fmt: skip
        sound = all(type(getattr(row, name)) is kind for name, kind in kinds.items())
        if not sound or row.kind not in KINDS or len(row.key) != 4 * (row.stop - row.start):
            raise ValueError("a row that contradicts itself")
        if row.start < 0 or (row.parent and not NAME.match(row.parent)):
            raise ValueError("a row that contradicts itself")
        return row


class Index:
    """Rows by file name. A method that fails says so once and changes nothing that matters."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._cache: Any = None
        self.failures = 0

    def open(self) -> None:
        """Open it, or make it anew if it cannot be opened. OSError if that fails too."""
        try:
            self._connect()
        except BROKEN:
            self._anew()

    def _anew(self) -> None:
        logging.getLogger(__name__).warning("the index of saved states is made anew")
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._connect()

    def _connect(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        database = self._folder / "cache.db"
        if database.is_symlink():
            raise OSError("the index is a link")
        os.close(os.open(database, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        self._cache = diskcache.Cache(
            str(self._folder),
            timeout=PATIENCE_S,
            disk=TextRows,
            eviction_policy="none",
            cull_limit=0,
            size_limit=1 << 62,
            statistics=0,
            tag_index=0,
            disk_min_file_size=1 << 62,
            disk_pickle_protocol=0,
            sqlite_mmap_size=0,
            sqlite_cache_size=512,
            sqlite_wal_autocheckpoint=64,
        )

    def close(self) -> None:
        with contextlib.suppress(*BROKEN):
            if self._cache is not None:
                self._cache.close()

    def nbytes(self) -> int:
        """Of its files."""
        found = 0
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            with contextlib.suppress(OSError):
                found += path.stat().st_size
        return found

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All that can be read; others are deleted."""
        bad = []
        for name in self._names():
            try:
                yield name, Row.from_text(self._cache[name])
            except (KeyError, *BROKEN):
                bad.append(name)
        self.delete(bad)

    def _names(self) -> list[str]:
        try:
            return [name for name in self._cache.iterkeys() if name != USES]
        except BROKEN:
            self._failed()
            self._anew()
            return []

    def uses(self) -> dict[str, int]:
        """Names, least recently used first, and how often each was used, as they were at the last end."""
        try:
            found = json.loads(self._cache.get(USES) or "{}")
            return {n: h for n, h in found.items() if NAME.match(n) and type(h) is int and h >= 0}
        except BROKEN:
            return {}

    def set_uses(self, uses: Mapping[str, int]) -> None:
        with self._told():
            self._cache.set(USES, json.dumps(dict(uses)))

    def set(self, rows: Mapping[str, Row]) -> None:
        with self._told(), self._cache.transact():
            for name, row in rows.items():
                self._cache.set(name, row.as_text())

    def delete(self, names: Iterable[str]) -> None:
        names = list(names)
        if names:
            with self._told(), self._cache.transact():
                for name in names:
                    self._cache.delete(name)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BROKEN:
            self._failed()

    def _failed(self) -> None:
        if not self.failures:
            logging.getLogger(__name__).warning(
                "the index of saved states does not answer; files' own headers serve", exc_info=True
            )
        self.failures += 1
