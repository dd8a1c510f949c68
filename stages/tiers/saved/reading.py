"""A state read from its files: settled by the owner, read by the I/O thread, taken by the owner.

The owner names the files and what must be in them; from then on the shelf may change. The I/O thread
reads, checks and makes arrays of its own, evaluated, which may cross threads. What was wrong is
reported with the outcome, so that only the owner touches the shelf.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from pipeline.types import State
from stages.rows.state import plain
from stages.tiers.radix import WORD
from stages.tiers.saved import contents
from stages.tiers.saved import format as form
from stages.tiers.saved.payload import flatten, map_arrays
from stages.tiers.saved.shelf import File, Run, key_of

FAULTS = (form.BadFileError, form.OtherFormatError, OSError, MemoryError, RuntimeError)
Read = Callable[[str], tuple[form.Header, Any]]


@dataclass(frozen=True)
class Piece:
    """One file of a state."""

    file: File
    chain: str  # digest of the namespace and all tokens up to the file's end
    span: tuple[int, int]  # its tokens that are wanted; of what is no run: none
    ready: tuple[form.Header, Any] | None  # where it is not yet written; evaluated


@dataclass
class Outcome:
    """What came of reading: `faults` are the files that could not be had, in order."""

    state: State | None = None
    faults: list[tuple[File, BaseException]] = field(default_factory=list)


def pieces_of(
    path: Sequence[Run], length: int, namespace: str, record: File | None = None
) -> list[Piece]:
    """The files that hold a path's first `length` tokens, and what hangs at its end; of the records of
    answers under way only `record`. Owner thread."""
    files: dict[str, File] = {run.file.name: run.file for run in path if run.file is not None}
    if path[-1].stop == length:
        extras = path[-1].extras.values()
        ends = (f for f in extras if f.kind != "spare" and (f is record or not key_of(f.label)))
        files |= {file.name: file for file in ends}
    return [_piece(file, path, length, namespace) for file in files.values()]


def _piece(file: File, path: Sequence[Run], length: int, namespace: str) -> Piece:
    key = file.runs[0].whole_key()[: file.stop * WORD]
    mine = [run for run in path if run.file is file]
    span = (mine[0].start, min(mine[-1].stop, length)) if mine else (length, length)
    ready = None if file.state == "stored" else _evaluated(*file.payload)
    return Piece(file, form.chain_of(namespace, key), span, ready)


def _evaluated(header: form.Header, payload: Any) -> tuple[form.Header, Any]:
    dense = map_arrays(payload, plain)
    arrays: list[mx.array] = []
    flatten(dense, arrays)
    mx.eval(arrays)
    return header, dense


def restore(
    read: Read, pieces: Iterable[Piece], tokens: tuple[int, ...], namespace: str, least: int
) -> Outcome:
    """Any thread. An attachment that cannot be had is left out; anything else: no state."""
    outcome, found = Outcome(), contents.Pieces(tokens, namespace, (), least)
    for piece in pieces:
        try:
            header, payload = piece.ready or read(piece.file.name)
            _expect(piece, header)
            _add(found, piece, header, payload)
        except FAULTS as error:
            outcome.faults.append((piece.file, error))
            if piece.file.kind != "attachment":
                return outcome
    outcome.state = found.state()
    return outcome


def _expect(piece: Piece, header: form.Header) -> None:
    """Rows of the index and names prove nothing: the file must say that it is the prompt's."""
    file = piece.file
    expected = (file.kind, file.label, file.start, file.stop, piece.chain)
    if (header.kind, header.label, header.start, header.stop, header.chain) != expected:
        raise form.BadFileError("it belongs to another prompt")


def _add(found: contents.Pieces, piece: Piece, header: form.Header, payload: Any) -> None:
    found.specs = found.specs or header.specs
    if found.specs != header.specs:
        raise form.BadFileError("it is of other layers")
    if header.kind == "run":
        found.runs.append((*piece.span, header.start, payload))
    elif header.kind == "boundary":
        found.boundary = payload
    else:
        found.attachments.append((header.label, payload))


class Loan:
    """A restored state (protocol Match). Its arrays are its own."""

    tier = "disk"

    def __init__(self, state: State):
        self.state = state

    def release(self) -> None: ...


class Restore:
    """A restore under way (protocol Fetch): over when it is read, or at `until` (monotonic seconds)."""

    def __init__(
        self,
        work: Future[Outcome],
        until: float,
        settle: Callable[[Restore], State | None],
        last: Run,
        length: int,
    ):
        self.work, self.until, self.last, self.length = work, until, last, length
        self.began = time.monotonic()
        self._settle = settle

    def done(self) -> bool:
        return self.work.done() or time.monotonic() >= self.until

    def wait(self) -> None:
        """Until it is over."""
        wait_for([self.work], max(0.0, self.until - time.monotonic()))

    def take(self) -> Loan | None:
        state = self._settle(self)
        return None if state is None else Loan(state)

    def release(self) -> None:
        """Nobody wants it any more."""
        self.work.cancel()
