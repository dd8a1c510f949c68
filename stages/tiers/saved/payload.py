"""Arrays and what holds them, as plain data: what of a state is written, and how it comes back.

A payload is any nesting of mappings, lists and tuples around arrays, whatever a row layout or a
drafter makes of it. `flatten` gives a JSON structure and the arrays in order; `rebuild` is its
inverse. Host views share the device arrays' memory, so only the owner thread may make them and
anybody may read them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.rows.blocks import Pages
from stages.rows.state import plain

CODES: Mapping[str, str] = {  # safetensors code -> the numpy type of the same size
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "uint16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
DTYPES: Mapping[mx.Dtype, str] = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.int64: "I64", mx.int32: "I32",
    mx.int16: "I16", mx.int8: "I8", mx.uint64: "U64", mx.uint32: "U32", mx.uint16: "U16",
    mx.uint8: "U8", mx.bool_: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class HostArray:
    """One array on the host, in C order or a strided view of it. `data` of BF16 is its bits."""

    code: str
    data: np.ndarray

    def to_device(self) -> mx.array:
        """Owner thread; copies."""
        array = mx.array(self.data)
        return array.view(mx.bfloat16) if self.code == "BF16" else array

    def tokens(self, low: int, high: int) -> HostArray:
        """A view of tokens [low, high) of (heads, tokens, dim)."""
        return HostArray(self.code, self.data[:, low:high])


def flatten(value: Any, arrays: list[Any]) -> Any:
    """JSON for `value`; its arrays are appended to `arrays` and referred to by number."""
    if isinstance(value, mx.array | HostArray | Pages):
        arrays.append(value)
        return {"t": len(arrays) - 1}
    if isinstance(value, Mapping):
        return {"m": [[key, flatten(item, arrays)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        tag = "u" if isinstance(value, tuple) else "l"
        return {tag: [flatten(item, arrays) for item in value]}
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode()}
    assert value is None or isinstance(value, str | int | float), f"cannot be saved: {type(value)}"
    return {"v": value}


def rebuild(structure: Any, arrays: Seq[Any]) -> Any:
    """What `flatten` took apart. ValueError, KeyError or IndexError for what it cannot have made."""
    ((tag, content),) = structure.items()
    if tag == "t":
        return arrays[content]
    if tag == "m":
        return {key: rebuild(item, arrays) for key, item in content}
    if tag == "b":
        return base64.b64decode(content, validate=True)
    if tag == "v":
        return content
    make: Callable[[Iterable[Any]], Any] = {"u": tuple, "l": list}[tag]
    return make(rebuild(item, arrays) for item in content)


def map_arrays(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same payload with every array changed."""
    arrays: list[Any] = []
    structure = flatten(value, arrays)
    return rebuild(structure, [change(array) for array in arrays])


def to_host(arrays: Seq[Any]) -> list[HostArray]:
    """Evaluate and look at them from the host. Owner thread; copies nothing but BF16 and blocks."""
    dense = [plain(array) for array in arrays]
    codes = [DTYPES[array.dtype] for array in dense]
    bits = [a.view(mx.uint16) if c == "BF16" else a for a, c in zip(dense, codes, strict=True)]
    mx.eval(bits)
    return [HostArray(c, np.asarray(a)) for c, a in zip(codes, bits, strict=True)]
