"""Digests of weight files: the identity that saved state depends on.

A digest is over bytes, so a copy, a link or a trailing slash changes nothing and a changed byte
changes everything. Hashing many gigabytes at every start would cost minutes, so a file's digest
is remembered under its real path, size, modification and change times and inode. It is not
remembered for a file touched in the last seconds, whose times could hide another write.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.identity import digest, file_digest
from pipeline.types.places import user_path

LOADER = 1  # raise when the same bytes begin to give other numbers
SETTLED_S = 5.0


def user_folder(setting: str | None) -> Path:
    """The user's cache folder: the setting, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    if setting:
        return user_path(setting).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def artifact(files: Mapping[str, Path], facts: Mapping[str, Any], memory: Path) -> str:
    """Digest over the named files' bytes, how they are read (`facts`), and by which code."""
    digests = {name: remembered_digest(path, memory) for name, path in sorted(files.items())}
    from importlib.metadata import version

    code = {"loader": LOADER, "mlx_lm": version("mlx-lm")}
    return digest({"files": digests, "facts": dict(facts), "code": code})


def remembered_digest(path: Path, memory: Path) -> str:
    """`file_digest`, from `memory` (a folder) where this very file was hashed before."""
    path = path.resolve()
    stat = path.stat()
    key = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    note = memory / "digests" / digest({"path": str(path)})
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(note.read_text())
        if saved["key"] == key:
            return str(saved["digest"])
    value = file_digest(path)
    if time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S:
        with contextlib.suppress(OSError):
            write_atomically(note, json.dumps({"key": key, "digest": value}).encode())
    return value


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Readers see the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with partial.open("wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
