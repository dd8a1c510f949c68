"""The folder that saved files live in: safe writes, true sizes, and hands off what is not ours.

Layout: `files/ab/<40 hex>.safetensors`, `index/` (see `index.py`), `lock` and `attempts` (see
`claims.py`). Folders are 0700, files
0600. A file is written under a temporary name, made durable, renamed, and its folder made durable;
it exists or it does not, whenever the process dies. Temporary files are locked by their writer, so
what a dead process left is known by its missing lock, without clocks or process numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".safetensors"
NAME = re.compile(r"^[0-9a-f]{40}$")
OURS = re.compile(r"^([0-9a-f]{40})\.safetensors$")
TEMPORARY = re.compile(r"^[0-9a-f]{40}\.[0-9a-f]{16}\.tmp$")
POLL_S = 0.005  # how soon to look again whether the folder's lock is free


class LockedError(OSError):
    """Another process holds the folder just now."""


@dataclass
class Scan:
    """What is there: our files by name with their sizes, and the bytes of everything in the folder."""

    sizes: dict[str, int] = field(default_factory=dict)
    temporary: list[Path] = field(default_factory=list)
    total: int = 0


@dataclass
class Draft:
    """A file that is being written."""

    name: str
    path: Path
    file: BinaryIO


class Folder:
    """OSError wherever the file system refuses; callers make a miss or a drop of it."""

    def __init__(self, root: Path):
        self.root = root
        self.files = root / "files"

    def make(self) -> None:
        """Create what is missing, keep others out of what is there, and prove that it can be written to.
        The root itself is left as it is where it also holds what is not ours."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = [self.files, self.root / "index"]
        for path in ours:
            path.mkdir(mode=0o700, exist_ok=True)
            _shut(path, os.O_NOFOLLOW)
        if {path.name for path in self.root.iterdir()} <= {"files", "index", "lock", "attempts"}:
            _shut(self.root)
        probe = self.files / f"{'0' * 40}.{secrets.token_hex(8)}.tmp"
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()

    @contextlib.contextmanager
    def locked(self, wait_s: float) -> Iterator[None]:
        """Alone among all processes that use the folder; LockedError if another holds it for longer
        than `wait_s`. Freed by the system if the process dies."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(self.root / "lock", flags, 0o600)
        try:
            until = time.monotonic() + wait_s
            while not _lock(handle):
                if time.monotonic() >= until:
                    raise LockedError(errno.EAGAIN, "another process holds its lock")
                time.sleep(POLL_S)
            yield
        finally:
            os.close(handle)

    def path(self, name: str) -> Path:
        assert NAME.match(name), name
        return self.files / name[:2] / (name + SUFFIX)

    def scan(self) -> Scan:
        """Everything in the folder, foreign files too: they take room, but are never touched."""
        found = Scan()
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                try:
                    size = path.lstat().st_size
                except FileNotFoundError:
                    continue  # another process has removed it meanwhile
                found.total += size
                if match := OURS.match(name):
                    if path == self.path(match[1]):
                        found.sizes[match[1]] = size
                elif TEMPORARY.match(name) and path.parent.parent == self.files:
                    found.temporary.append(path)
        return found

    def sweep(self, temporary: list[Path]) -> int:
        """Remove temporary files that nobody writes any more; how many."""
        removed = 0
        for path in temporary:
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed += 1
                finally:
                    os.close(handle)
        return removed

    def free(self) -> int:
        """Bytes the disk has left for us."""
        return shutil.disk_usage(self.root).free

    def begin(self, name: str, size: int) -> Draft:
        """A temporary file that counts as `size` bytes from now on, for every process that scans."""
        home = self.path(name).parent
        if not home.is_dir():
            home.mkdir(mode=0o700, exist_ok=True)
            _sync(self.files)
        path = home / f"{name}.{secrets.token_hex(8)}.tmp"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.ftruncate(handle, size)
        return Draft(name, path, os.fdopen(handle, "r+b", 0))

    def publish(self, draft: Draft) -> None:
        """Its content is durable; now its name is."""
        os.replace(draft.path, self.path(draft.name))
        _sync(draft.path.parent)
        draft.file.close()

    def discard(self, draft: Draft) -> None:
        with contextlib.suppress(OSError):
            draft.path.unlink()
        with contextlib.suppress(OSError):
            draft.file.close()

    def remove(self, name: str) -> None:
        """One that cannot be removed is emptied, so that nothing is ever read from it again."""
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                self._empty(name)
            raise

    def _empty(self, name: str) -> None:
        handle = os.open(self.path(name), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, 0)
            os.fsync(handle)
        finally:
            os.close(handle)


def _shut(folder: Path, flags: int = 0) -> None:
    """To everybody else. OSError where that is not ours to do, or it is a link (O_NOFOLLOW)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        if os.fstat(handle).st_mode & 0o077:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
