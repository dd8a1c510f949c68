"""Which answers under way somebody works on, among all processes that share a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from hashlib import sha256
from pathlib import Path

PLACES = 1 << 62  # bytes of a file may be locked that it does not have


class Claims:
    """A lock on one byte of an empty file for each. The system lets go of what a dead process held. Locks are
    a process's: engines of one process on one folder do not keep each other out. I/O thread, but for
    `open` and `close`."""

    def __init__(self, path: Path):
        self._path = path
        self._handle = -1

    def open(self) -> None:
        """OSError where the file cannot be made."""
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(self._path, flags, 0o600)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def take(self, label: str) -> bool:
        """Whether it is ours now; False if another process works on it. A file system without locks has one
        user."""
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(label))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def give(self, label: str) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, _place(label))


def _place(label: str) -> int:
    return int.from_bytes(sha256(label.encode()).digest()[:8]) % PLACES
