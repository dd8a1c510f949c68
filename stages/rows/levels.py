"""Lloyd-Max codes of vectors whose coordinates look like those of a random direction.

Each group of a vector is stored as its length (the scale) and, for each coordinate of its direction,
the nearest level of a codebook made for that dimension. Rotated vectors are such (`turned`).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from stages.rows.codebook import levels
from stages.rows.codes import OCTET, Door, Straight, code_words, joined, pack, unpack

BITS = range(1, 9)


class Levels(Straight):
    """A `Codec` for vectors of `size` numbers of type `dtype`, a multiple of OCTET."""

    def __init__(self, bits: int, group: int, size: int, dtype: mx.Dtype):
        assert group % OCTET == 0, group
        self.bits, self.group, self.size, self.dtype = bits, group, size, dtype
        self.levels = levels(bits, group)
        self.table = mx.array(self.levels.astype(np.float32))
        self.edges = mx.array(((self.levels[1:] + self.levels[:-1]) / 2).astype(np.float32))
        self._words = code_words(bits, size)
        self._door = Door(bits, group, size, self.levels) if dtype == mx.float32 else None

    def pack(self, x_BHTD: mx.array) -> mx.array:
        grouped = mx.unflatten(x_BHTD.astype(mx.float32), -1, (-1, self.group))
        lengths = mx.sqrt(grouped.square().sum(-1, keepdims=True))
        codes = self._nearest(grouped / mx.maximum(lengths, 1e-30)).flatten(-2)
        return joined(pack(codes, self.bits), lengths[..., 0].astype(self.dtype))

    def spell_out(self, rows_BHTW: mx.array) -> mx.array:
        if self._door and self._door.is_open:
            return self._door.spell_out(rows_BHTW)
        words, kept = rows_BHTW[..., : self._words], rows_BHTW[..., self._words :]
        lengths = kept.view(self.dtype)[..., : self.size // self.group]
        spelled = self.table[unpack(words, self.bits, self.size)]
        grouped = mx.unflatten(spelled, -1, (-1, self.group)) * lengths[..., None]
        return grouped.flatten(-2).astype(self.dtype)

    def _nearest(self, unit: mx.array) -> mx.array:
        """Number of the nearest level, by halving."""
        code = mx.zeros(unit.shape, mx.uint8)
        step = 2 ** (self.bits - 1)
        while step:
            code = code + (unit > self.edges[code + (step - 1)]).astype(mx.uint8) * step
            step //= 2
        return code
