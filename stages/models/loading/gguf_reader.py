"""Read a GGUF file's header: metadata and where the tensors lie.

The `gguf` package's own reader takes 3 to 12 seconds for vocabularies of 49k to 262k entries, and
`mx.load` refuses files with quantization types it does not know; this one takes a fraction of a
second and leaves the data in the file until it is asked for.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import OpenError

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9

# ggml type -> (name, elements a block, bytes a block)
BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 30: ("BF16", 1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is outermost first, as in NumPy."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open file: numbers as Python numbers, arrays as NumPy arrays or lists of strings."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def types(self) -> frozenset[str]:
        return frozenset(info.type for info in self.tensors.values())

    def blocks(self, name: str) -> np.ndarray:
        """The tensor's raw bytes (blocks, bytes a block), mapped from the file."""
        info = self.tensors[name]
        raw = np.memmap(self.path, np.uint8, "r", offset=info.offset, shape=(info.nbytes,))
        return raw.reshape(-1, next(size for n, _, size in BLOCKS.values() if n == info.type))


def read(path: Path) -> GGUFFile:
    """OpenError where the file is not GGUF, is cut short or holds an unknown tensor type."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except (OSError, ValueError, IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise OpenError(f"{path} is no readable GGUF file: {error}") from error


def _read(path: Path, data: mmap.mmap) -> GGUFFile:
    if data[:4] != b"GGUF":
        raise ValueError("it does not start with the letters GGUF")
    cursor = _Cursor(data, 4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not 2 or 3")
    n_tensors, n_metadata = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(n_metadata)}
    infos = [_tensor(cursor) for _ in range(n_tensors)]
    align = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // align) * align
    tensors = {name: _place(name, shape, kind, start + at) for name, shape, kind, at in infos}
    end = max((info.offset + info.nbytes for info in tensors.values()), default=0)
    if end > len(data):
        raise ValueError(f"it is cut short: {len(data):,} bytes of {end:,}")
    return GGUFFile(path, metadata, tensors)


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
    return name, tuple(reversed(dims)), cursor.number("I"), cursor.number("Q")


def _place(name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    if kind not in BLOCKS:
        raise ValueError(f"tensor {name} has the unknown type {kind}")
    label, elements, size = BLOCKS[kind]
    count = int(np.prod(shape, dtype=np.int64))
    return TensorInfo(name, shape, label, offset, count // elements * size)


class _Cursor:
    """Reads forward through the header."""

    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.at += length
        if self.at > len(self.data):
            raise ValueError("it is cut short in the header")
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        return self.array() if kind == ARRAY else self.number(SCALARS[kind])

    def array(self) -> Any:
        kind, length = self.number("I"), self.number("Q")
        if kind == STRING:
            return self.strings(length)
        if kind == ARRAY:
            return [self.array() for _ in range(length)]
        dtype = np.dtype("<" + SCALARS[kind])
        values = np.frombuffer(self.data, dtype, length, self.at).copy()
        self.at += values.nbytes
        return values

    def strings(self, count: int) -> list[str]:
        """A tight loop: vocabularies have up to 260k of them."""
        data, at, result = self.data, self.at, []
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            result.append(data[start:at].decode())
        self.at = at
        return result
