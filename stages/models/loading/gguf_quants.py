"""GGUF block types to float32.

The simple 32-element types are done here, whole tensors at a time; the rest goes to the `gguf`
package, which is several times slower. Layouts: ggml's `block_q*` structs.
"""

from __future__ import annotations

import numpy as np

from stages.models.loading.gguf_reader import GGUFFile


def dequantize(file: GGUFFile, name: str) -> np.ndarray:
    """Tensor `name` as float32 in its own shape."""
    info, blocks = file.tensors[name], file.blocks(name)
    if (unpack := UNPACK.get(info.type)) is None:
        return _slow(blocks, info.type).reshape(info.shape)
    return unpack(blocks).reshape(info.shape)


def _slow(blocks: np.ndarray, kind: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType[kind])


def _halves(blocks: np.ndarray, column: int) -> np.ndarray:
    """The float16 at byte `column` of every block, as float32 (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, column : column + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(blocks, 16) bytes -> (blocks, 32) float32: low halves first, then high halves."""
    out = np.empty((len(packed), 32), np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _halves(blocks, 0)
    return values


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    values = _nibbles(blocks[:, 4:])
    values *= _halves(blocks, 0)
    values += _halves(blocks, 2)
    return values


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """The fifth bits of the 32 elements lie in one little-endian word before the nibbles."""
    values = _nibbles(blocks[:, 6:])
    values += 16 * np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").view(np.int8) - 16
    values *= _halves(blocks, 0)
    return values


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8) * _halves(blocks, 0)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


UNPACK = {
    "F32": lambda blocks: blocks.view(np.float32).copy(),
    "F16": lambda blocks: blocks.view(np.float16).astype(np.float32),
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
}
