"""Affine codes: evenly spaced levels between the least and the greatest number of each group."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from stages.rows.products import Packed, by_group, dots, mix

KERNELS = (2, 3, 4, 5, 6, 8)  # bits
GROUPS = (32, 64, 128)  # what mx.quantize takes
SPLIT = (4, 8)  # bits whose codes are whole bytes or halves, and so are quick to take apart


@dataclass(frozen=True)
class Grid:
    """The `Codec` of `mx.quantize`. Stored: uint32 (B, H, T, D bits / 32), scales and biases
    (B, H, T, G)."""

    bits: int
    group: int

    names = ("q", "s", "b")

    def pack(self, x_BHTD: mx.array) -> Packed:
        return tuple(mx.quantize(x_BHTD, group_size=self.group, bits=self.bits))

    def spell_out(self, packed: Packed) -> mx.array:
        return mx.dequantize(packed[0], packed[1], packed[2], self.group, self.bits)

    def dots(self, q_BHRD: mx.array, packed: Packed) -> mx.array:
        words, scales, biases = packed
        if q_BHRD.dtype != mx.float32:
            return mx.quantized_matmul(q_BHRD, words, scales, biases, True, self.group, self.bits)
        return dots(q_BHRD, self._codes(words), scales, biases)

    def mix(self, p_BHRT: mx.array, packed: Packed) -> mx.array:
        words, scales, biases = packed
        if p_BHRT.dtype != mx.float32:
            return mx.quantized_matmul(p_BHRT, words, scales, biases, False, self.group, self.bits)
        return mix(p_BHRT, self._codes(words), scales, biases)

    def _codes(self, words: mx.array) -> list[mx.array]:
        """As float32 (B, H, G, T, E): one array, or for 4 bits the even and the odd places."""
        if self.bits not in SPLIT:
            ones = mx.ones((*words.shape[:-1], words.shape[-1] * 32 // self.bits // self.group))
            spelled = mx.dequantize(words, ones, mx.zeros_like(ones), self.group, self.bits)
            return [by_group(spelled, self.group)]
        octets = by_group(mx.view(words, mx.uint8), self.group * self.bits // 8)
        if octets.shape[2] > 1:  # else the product copies four times as many bytes
            octets = mx.contiguous(octets)
        parts = [octets] if self.bits == 8 else [octets & 15, octets >> 4]
        return [part.astype(mx.float32) for part in parts]
