"""Answers that later requests may go on from, of /v1/responses and of threads of /v1/messages."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.server.errors import dump
from pipeline.types.places import user_path

log = logging.getLogger("headrace.server")

ID = re.compile("(resp|msg)_[0-9a-f]{32}")  # what is made here: nothing else is ever looked up

Place = tuple[str, str]  # owner, id


@dataclass
class _Kept:
    size: int  # bytes
    expires: float  # seconds since the epoch
    data: bytes | None  # None: on disk


class ResponseStore:
    """The last answers, up to `max_bytes` of JSON; each is forgotten `ttl_s` seconds after it was made. Each
    belongs to the `owner` who asked for it (the name of a key, or nobody's) and is not there for others. Where
    there is no room, the owner of most bytes loses the longest unused: nobody drives out those who hold less. With
    a `folder` they are files there, one each, an owner's in a folder of their own, written whole or not at all, and
    outlive the process. Safe on any thread."""

    def __init__(self, *, ttl_s: float, max_bytes: int, folder: str | None = None):
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._folder = user_path(folder) if folder else None
        self._kept: defaultdict[str, OrderedDict[str, _Kept]] = defaultdict(OrderedDict)
        self._bytes: Counter[str] = Counter()  # by owner
        self._lock = threading.RLock()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._find()
            self._forget_old()

    def put(self, owner: str, name: str, record: dict[str, Any]) -> None:
        """One that is larger than all the room is not kept, nor one that the disk does not take."""
        assert ID.fullmatch(name)
        data = dump(record)
        with self._lock:
            self._forget_old()
            self.delete(owner, name)
            if len(data) > self._max_bytes:
                return
            try:
                self._write((owner, name), data)
            except OSError as error:
                log.warning("an answer was not kept: %s", error)
                return
            kept = data if self._folder is None else None
            self._add((owner, name), _Kept(len(data), time.time() + self._ttl_s, kept))
            self._make_room()

    def get(self, owner: str, name: str) -> dict[str, Any] | None:
        """None if it is not there any more, never was, or is somebody else's."""
        with self._lock:
            data = self._data(owner, name)
        with contextlib.suppress(ValueError):
            return None if data is None else dict(json.loads(data))
        return None

    def delete(self, owner: str, name: str) -> bool:
        with self._lock:
            kept = self._kept[owner].pop(name, None)
            if kept is None:
                return False
            self._bytes[owner] -= kept.size
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._file((owner, name)).unlink()
        return True

    def _data(self, owner: str, name: str) -> bytes | None:
        kept = self._kept[owner].get(name)
        if kept is None:
            return None
        data = kept.data
        if kept.expires > time.time() and data is None:
            with contextlib.suppress(OSError):
                data = self._file((owner, name)).read_bytes()
        if data is None or kept.expires <= time.time():
            self.delete(owner, name)
            return None
        self._kept[owner].move_to_end(name)
        return data

    def _forget_old(self) -> None:
        now = time.time()
        old = [
            (owner, name)
            for owner, answers in self._kept.items()
            for name, kept in answers.items()
            if kept.expires <= now
        ]
        for place in old:
            self.delete(*place)

    def _make_room(self) -> None:
        while self._bytes.total() > self._max_bytes:
            ((owner, _),) = self._bytes.most_common(1)
            self.delete(owner, next(iter(self._kept[owner])))

    def _add(self, place: Place, kept: _Kept) -> None:
        owner, name = place
        self._kept[owner][name] = kept
        self._bytes[owner] += kept.size

    def _file(self, place: Place) -> Path:
        owner, name = place
        assert self._folder is not None
        return self._folder / owner / f"{name}.json"

    def _write(self, place: Place, data: bytes) -> None:
        if self._folder is None:
            return
        file = self._file(place)
        if place[0]:
            file.parent.mkdir(exist_ok=True, mode=0o700)
        unfinished = file.with_suffix(".new")
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as new:
            new.write(data)
        os.replace(unfinished, file)

    def _find(self) -> None:
        """What an earlier process left, the oldest first; what it did not finish is removed."""
        assert self._folder is not None
        for file in (*self._folder.glob("*_*.new"), *self._folder.glob("*/*_*.new")):
            file.unlink(missing_ok=True)
        files = [*self._folder.glob("*_*.json"), *self._folder.glob("*/*_*.json")]
        for file in sorted(files, key=lambda f: f.stat().st_mtime):
            owner = "" if file.parent == self._folder else file.parent.name
            if not ID.fullmatch(file.stem):
                continue
            state = file.stat()
            self._add((owner, file.stem), _Kept(state.st_size, state.st_mtime + self._ttl_s, None))
        self._make_room()
