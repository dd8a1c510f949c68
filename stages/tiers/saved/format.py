"""One saved file: a safetensors payload, and a header that says what it is and proves it.

Read by anybody who reads safetensors. `__metadata__` holds `headrace`, a JSON text (what the file
is, where each array belongs, a CRC-32 of each), and `digest`, a SHA-256 of that text and of the table of
arrays, so that neither can be changed unnoticed. `chain` is a SHA-256 of the namespace and all
token ids up to `stop`: who knows the prompt knows whether the file is the prompt's.

Three kinds: a `run` holds the layers that can be cut by tokens for [start, stop); a `boundary` what
has a meaning at `stop` alone (recurrent layers, windows); an `attachment` a drafter's companion state.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.types import LayerSpec
from stages.tiers.saved.payload import CODES, HostArray

FORMAT = 1
MOST_HEADER = 64 << 20  # bytes; a larger one is no header of ours
BLOCK = 4 << 20  # bytes read or written at a time
LARGE = 1 << 16  # bytes; checksums of smaller arrays are computed at once
KINDS = ("run", "boundary", "attachment")


class OtherFormatError(Exception):
    """A file that another version wrote: not for us, and not ours to remove."""


class BadFileError(Exception):
    """The file is not what it should be. Never the client's business: a miss."""


def chain_of(namespace: str, key: bytes) -> str:
    """Digest of a namespace and packed token ids."""
    return hashlib.sha256(f"headrace:{FORMAT}:{namespace}:".encode() + key).hexdigest()


@dataclass(frozen=True)
class Header:
    """What a file says of itself: enough to place it without reading its payload."""

    kind: str
    namespace: str
    parent: str  # name of the run that holds the token before `start`; "" where there is none
    start: int
    stop: int  # tokens; equal to `start` but for runs
    key: bytes  # packed ids of [start, stop)
    chain: str
    specs: tuple[LayerSpec, ...]
    cuttable: bool = True  # usable at any length, without a boundary
    min_reuse: int = 0
    label: str = ""  # an attachment's own namespace
    structure: Any = None  # of the payload, see `payload.flatten`
    crcs: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Where it is found: the same content has the same name."""
        facts = (self.kind, self.chain, self.start, self.min_reuse > 0, self.label)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:40]

    def as_text(self) -> str:
        """Canonical JSON. CRCs have a fixed width, so that the text's length is known before them."""
        fields = {**vars(self), "format": FORMAT, "key": base64.b64encode(self.key).decode()}
        fields["crcs"] = [f"{crc:08x}" for crc in self.crcs]
        fields["specs"] = [list(vars(spec).values()) for spec in self.specs]
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Header:
        """BadFileError for anything `as_text` does not write."""
        try:
            fields = json.loads(text)
            said = fields.pop("format")
            if type(said) is int and said != FORMAT:
                raise OtherFormatError(f"format {said}, not {FORMAT}")
            if said != FORMAT or fields["kind"] not in KINDS:
                raise BadFileError("no kind of ours")
            fields["key"] = base64.b64decode(fields["key"], validate=True)
            fields["crcs"] = tuple(int(crc, 16) for crc in fields["crcs"])
            fields["specs"] = tuple(LayerSpec(*spec) for spec in fields["specs"])
            header = cls(**fields)
            sound = 0 <= header.start <= header.stop and isinstance(header.parent, str)
            sound &= isinstance(header.namespace, str) and isinstance(header.label, str)
            if not sound or len(header.key) != 4 * (header.stop - header.start):
                raise BadFileError("a header that contradicts itself")
            return header
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadFileError(f"no header of ours: {error!r}") from error


def file_size(header: Header, arrays: Seq[HostArray]) -> int:
    """Bytes of the whole file."""
    return len(_preamble(header, arrays)) + sum(array.data.nbytes for array in arrays)


def write(file: BinaryIO, header: Header, arrays: Seq[HostArray]) -> Header:
    """Write all of it and make it durable; the header goes last, once the CRCs are known."""
    blank = replace(header, crcs=(0,) * len(arrays))
    file.seek(len(_preamble(blank, arrays)))
    with ThreadPoolExecutor(1) as beside:  # checksums cost about what writing does
        crcs = [_crc_beside(beside, array.data) for array in arrays]
        for array in arrays:
            _write_array(file, array.data)
        whole = replace(header, crcs=tuple(crc() for crc in crcs))
    file.seek(0)
    file.write(_preamble(whole, arrays))
    file.flush()
    os.fsync(file.fileno())
    return whole


def _write_array(file: BinaryIO, data: np.ndarray) -> None:
    """In C order, without copying where its rows are contiguous."""
    for part in _contiguous(data):
        buffer = part.data.cast("B")
        for at in range(0, len(buffer), BLOCK):
            file.write(buffer[at : at + BLOCK])


def _crc(data: np.ndarray) -> int:
    """CRC-32 of what `_write_array` writes."""
    crc = 0
    for part in _contiguous(data):
        crc = zlib.crc32(part.data.cast("B"), crc)
    return crc


def _crc_beside(beside: ThreadPoolExecutor, data: np.ndarray) -> Callable[[], int]:
    """`_crc`, on the other thread where that pays."""
    if data.nbytes >= LARGE:
        return beside.submit(_crc, data).result
    crc = _crc(data)
    return lambda: crc


def _contiguous(data: np.ndarray) -> list[np.ndarray]:
    if data.size == 0:
        return []
    if data.flags.c_contiguous:
        return [data.reshape(-1)]
    if data.ndim > 1 and all(row.flags.c_contiguous for row in data):
        return [row.reshape(-1) for row in data]
    return [np.ascontiguousarray(data).reshape(-1)]


def _preamble(header: Header, arrays: Seq[HostArray]) -> bytes:
    """Length and JSON of the safetensors header, padded to 64 bytes."""
    if not header.crcs:
        header = replace(header, crcs=(0,) * len(arrays))
    text, table = header.as_text(), _table(arrays)
    whole = {"__metadata__": {"headrace": text, "digest": _digest(text, table)}, **table}
    raw = json.dumps(whole, separators=(",", ":")).encode()
    raw += b" " * (-(len(raw) + 8) % 64)
    return len(raw).to_bytes(8, "little") + raw


def _table(arrays: Seq[HostArray]) -> dict[str, dict[str, Any]]:
    table, at = {}, 0
    for index, array in enumerate(arrays):
        stop = at + array.data.nbytes
        entry = {"dtype": array.code, "shape": list(array.data.shape), "data_offsets": [at, stop]}
        table[f"t{index}"] = entry
        at = stop
    return table


def _digest(text: str, table: Mapping[str, Any]) -> str:
    rest = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{len(text)}:{text}{rest}".encode()).hexdigest()


def open_plain(path: Path) -> BinaryIO:
    """For reading; never through a link (BadFileError). Other OSErrors say nothing about the file."""
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise BadFileError(f"cannot be opened: {error.strerror}") from error
        raise


def read_header(file: BinaryIO) -> tuple[Header, Mapping[str, Any], int]:
    """Header, table of arrays, and where the data begins; lengths and digest are checked."""
    try:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(MOST_HEADER, size - 8):
            raise BadFileError(f"a header of {length} bytes in a file of {size}")
        table = json.loads(_read(file, length).tobytes())
        meta = table.pop("__metadata__")
        if meta["digest"] != _digest(meta["headrace"], table):
            raise BadFileError("the header has been changed")
        end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
        if size != 8 + length + end:
            raise BadFileError(f"{size} bytes, not {8 + length + end}")
        return Header.from_text(meta["headrace"]), table, 8 + length
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFileError(f"no file of ours: {error!r}") from error


def read_file(path: Path) -> tuple[Header, list[HostArray]]:
    """All of a file, every checksum compared. Any thread. BadFileError; OSError where it could not be
    read just now, which is no reason to remove it."""
    with open_plain(path) as file:
        _hint(file)
        header, table, start = read_header(file)
        size = os.fstat(file.fileno()).st_size - start
        try:
            entries = [table[f"t{index}"] for index in range(len(table))]
            arrays, crcs = _read_arrays(file, entries, size)
        except (ValueError, KeyError, TypeError) as error:
            raise BadFileError(f"cannot be read: {error!r}") from error
    if crcs != header.crcs:
        raise BadFileError("a checksum differs")
    return header, arrays


def _hint(file: BinaryIO) -> None:
    """All of it will be read: the disk may begin (Linux)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _read_arrays(
    file: BinaryIO, entries: Seq[Mapping[str, Any]], size: int
) -> tuple[list[HostArray], tuple[int, ...]]:
    """Arrays that follow each other, and their checksums, which another thread computes meanwhile."""
    data, filled, at = np.empty(size, np.uint8), 0, 0
    arrays, crcs = [], []
    with ThreadPoolExecutor(1) as beside:
        for entry in entries:
            first, stop = entry["data_offsets"]
            if not first == at <= stop <= size:
                raise BadFileError(f"an array in [{first}, {stop}), not from {at}")
            while filled < stop:
                filled += _fill(file, data[filled : filled + BLOCK])
            at, part = stop, data[first:stop]
            crcs.append(_crc_beside(beside, part))
            part = part.view(CODES[entry["dtype"]]).reshape(entry["shape"])
            arrays.append(HostArray(entry["dtype"], part))
        return arrays, tuple(crc() for crc in crcs)


def _read(file: BinaryIO, size: int) -> np.ndarray:
    """`size` bytes. BadFileError if there are fewer."""
    data, at = np.empty(size, np.uint8), 0
    while at < size:
        at += _fill(file, data[at : at + BLOCK])
    return data


def _fill(file: BinaryIO, part: np.ndarray) -> int:
    """Read into memory that is there; how many bytes came, at least one."""
    got: int = getattr(file, "readinto")(part.data)  # noqa: B009  # BinaryIO does not declare it
    if not got:
        raise BadFileError("it is shorter than it says")
    return got
