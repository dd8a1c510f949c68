"""GGUF block types to float32.

The common types are done here, whole tensors at a time; the rest goes to the `gguf` package, which
is several times slower. Layouts: ggml's `block_q*` structs (ggml-common.h).
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


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Eight runs of 32: value = scale * nibble - offset. Scales and offsets have six bits each: of
    the first four in bytes 4..11 low; of the last four as nibbles of 12..15 under the top bits."""
    low, high = blocks[:, 4:12] & 63, blocks[:, 4:12] >> 6 << 4
    tail = blocks[:, 12:16]
    scales = np.concatenate([low[:, :4], (tail & 15) | high[:, :4]], axis=1)
    offsets = np.concatenate([low[:, 4:], (tail >> 4) | high[:, 4:]], axis=1)
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    values = (
        np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    )
    values *= (_halves(blocks, 0) * scales)[:, :, None]
    values -= (_halves(blocks, 2) * offsets)[:, :, None]
    return values


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Two halves of 128, each four runs of 32: four bits from two runs of bytes' low, then high
    nibbles, two bits from one run of bytes; a signed scale for every 16 elements."""
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32)
    four = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    two = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    values = ((four | two).view(np.int8) - 32).reshape(-1, 16, 16).astype(np.float32)
    values *= (_halves(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]
    return values


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
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
