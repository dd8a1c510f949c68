"""Where results are written: one run at a time, whole files only, never over somebody else's."""

from __future__ import annotations

import contextlib
import json
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipeline.errors import HeadraceError
from pipeline.types.places import user_path

MARK = "headrace.json"  # says whose folder it is: kind, and what of
LOCK = ".lock"


class FolderError(HeadraceError):
    """The folder cannot be used; the message says what to do."""


@contextlib.contextmanager
def own(folder: Path, mark: Mapping[str, Any], *, again: bool) -> Iterator[Path]:
    """The folder, locked, while the block runs. It is made if it is not there; with `again` one that
    bears the same mark is gone on with. FolderError for any other that exists, while another run has
    it, and where one may not write. If the block fails before anything but the mark was written, the
    folder is gone again."""
    with _taught(folder):
        existed = folder.exists()
        _check(folder, mark, again)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    try:
        with _taught(folder):
            _check(folder, mark, again)  # another run may have come and gone meanwhile
            write(folder / MARK, json.dumps(mark, indent=1))
        yield folder
    finally:
        _leave(folder, existed)
        lock.release()


@contextlib.contextmanager
def _taught(folder: Path) -> Iterator[None]:
    """Why the folder cannot be had, with what to type next."""
    try:
        yield
    except Timeout:
        what = f"another run writes into {folder}. Wait until it ends, or choose another"
        raise FolderError(f"{what}: --out FOLDER") from None
    except OSError as error:
        what = f"{folder} cannot be written: {error.strerror or error}. Choose another"
        raise FolderError(f"{what}: --out FOLDER") from error


def _leave(folder: Path, existed: bool) -> None:
    """Nothing of ours stays where nothing came of it. A run that takes the folder meanwhile keeps it:
    what it has made there is no fault of the one that ends."""
    with contextlib.suppress(OSError):
        if _empty(folder):
            (folder / MARK).unlink(missing_ok=True)
            (folder / LOCK).unlink(missing_ok=True)
            if not existed:
                folder.rmdir()


def _check(folder: Path, mark: Mapping[str, Any], again: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is a file. Choose another: --out FOLDER")
    if folder.exists() and not _empty(folder):
        _belongs(folder, mark, again)


def _empty(folder: Path) -> bool:
    """Nothing but what a run leaves that was killed before its first result."""
    return {entry.name for entry in folder.iterdir()} <= {MARK, LOCK}


def _belongs(folder: Path, mark: Mapping[str, Any], again: bool) -> None:
    try:
        found = json.loads((folder / MARK).read_text("utf-8"))
    except (OSError, ValueError):
        found = None
    if again and found == dict(mark):
        return
    if not again and found is not None:
        whose = "holds results already"
    elif isinstance(found, Mapping) and "of" in found:
        whose = f"holds the {found.get('kind')} of {found['of']}"
    else:
        whose = "exists, and no run of ours made it"
    raise FolderError(f"{folder} {whose}. Choose another (--out FOLDER), or remove it.")


def write(path: Path, text: str) -> None:
    """The whole file or none: written beside it, then renamed."""
    unfinished = _unfinished(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def writable(text: str) -> Path:
    """A file that `write` can write, known before any work is done. As `type=` of an argument:
    ArgumentTypeError says why not."""
    path = user_path(text)
    try:
        if path.is_dir():
            raise ArgumentTypeError(f"{path} is a folder. Name a file in it, as {path / 'NAME'}")
        unfinished = _unfinished(path)
        unfinished.touch()
        unfinished.unlink()
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}. Name a file where you may write"
        raise ArgumentTypeError(what) from error
    return path


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def sweep_leftovers(folder: Path) -> None:
    """Remove what a killed run of ours left unfinished in a folder that we have locked."""
    for path in folder.rglob(".*.*"):
        if re.fullmatch(r"\..+\.\d+", path.name) and path.is_file():
            path.unlink()
