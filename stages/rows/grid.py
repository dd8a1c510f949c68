"""Affine codes: evenly spaced levels between the least and the greatest number of each group."""

from __future__ import annotations

import mlx.core as mx

from stages.rows.codes import Door, Straight, code_words, joined

KERNELS = (2, 3, 4, 5, 6, 8)  # bits
GROUPS = (32, 64, 128)  # what mx.quantize takes


class Grid(Straight):
    """The `Codec` of `mx.quantize`, for vectors of `size` numbers of type `dtype`."""

    def __init__(self, bits: int, group: int, size: int, dtype: mx.Dtype):
        self.bits, self.group, self.dtype = bits, group, dtype
        self._words = code_words(bits, size)
        self._door = Door(bits, group, size) if dtype == mx.float32 else None

    def pack(self, x_BHTD: mx.array) -> mx.array:
        return joined(
            *mx.quantize(x_BHTD.astype(self.dtype), group_size=self.group, bits=self.bits)
        )

    def spell_out(self, rows_BHTW: mx.array) -> mx.array:
        if self._door and self._door.is_open:
            return self._door.spell_out(rows_BHTW)
        words, kept = rows_BHTW[..., : self._words], rows_BHTW[..., self._words :]
        scales, biases = mx.split(kept.view(self.dtype), 2, axis=-1)
        return mx.dequantize(words, scales, biases, self.group, self.bits)
