"""Lloyd-Max codes of vectors whose coordinates look like those of a random direction.

Each group of a vector is stored as its length (the scale) and, for each coordinate of its direction,
the nearest level of a codebook made for that dimension. Rotated vectors are such (`turned`).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from stages.rows.bits import BitPacking
from stages.rows.codebook import levels
from stages.rows.products import Packed, by_group, dots, mix

BITS = range(1, 9)


class Levels:
    """A `Codec`. Stored: uint8 (B, H, T, D bits / 8), lengths (B, H, T, G)."""

    names = ("c", "n")

    def __init__(self, bits: int, group: int):
        self.bits, self.group = bits, group
        self.packing = BitPacking(bits)
        self.levels = levels(bits, group)
        self.table = self.packing.table(self.levels)
        self.edges = mx.array(((self.levels[1:] + self.levels[:-1]) / 2).astype(np.float32))

    def pack(self, x_BHTD: mx.array) -> Packed:
        grouped = mx.unflatten(x_BHTD.astype(mx.float32), -1, (-1, self.group))
        lengths = mx.sqrt(grouped.square().sum(-1, keepdims=True))
        unit = grouped / mx.maximum(lengths, 1e-30)
        octets = self.packing.pack(self._nearest(unit)).flatten(-2)
        return octets, lengths[..., 0].astype(x_BHTD.dtype)

    def spell_out(self, packed: Packed) -> mx.array:
        (codes,), lengths = self._codes(packed[0]), packed[1]
        spelled = codes * lengths.swapaxes(-1, -2)[..., None].astype(mx.float32)
        return spelled.swapaxes(2, 3).flatten(-2).astype(lengths.dtype)

    def dots(self, q_BHRD: mx.array, packed: Packed) -> mx.array:
        scales = packed[1].astype(mx.float32)
        return dots(q_BHRD.astype(mx.float32), self._codes(packed[0]), scales).astype(q_BHRD.dtype)

    def mix(self, p_BHRT: mx.array, packed: Packed) -> mx.array:
        scales = packed[1].astype(mx.float32)
        return mix(p_BHRT.astype(mx.float32), self._codes(packed[0]), scales).astype(p_BHRT.dtype)

    def _codes(self, octets: mx.array) -> list[mx.array]:
        """The levels, float32 (B, H, G, T, E)."""
        index = self.packing.indices(by_group(octets, self.group * self.bits // 8))
        return [self.table[index].flatten(-2)]

    def _nearest(self, unit: mx.array) -> mx.array:
        """Number of the nearest level, by halving."""
        code = mx.zeros(unit.shape, mx.uint8)
        step = 2 ** (self.bits - 1)
        while step:
            code = code + (unit > self.edges[code + (step - 1)]).astype(mx.uint8) * step
            step //= 2
        return code
