"""Affine codes of vectors, and products with them that never spell the vectors out.

A group of `group` numbers of a vector is stored as `bits`-wide codes c with one scale s and one
bias b: x = s c + b (MLX's affine mode). So q·x = s (q·c) + b Σq, and Σ p x = (Σ p s c) + Σ p b.

Why not `mx.quantized_matmul` everywhere: on a CPU in float32 it took 3 to 5 times as long as these
products, which go to BLAS (4,096 keys, 3 heads of 64, width 9: 43 against 10 ms).

Legend: B rows, H heads of keys, R queries a head, T keys, D head size, G groups in D.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

KERNELS = (4, 8)  # bits
GROUPS = (32, 64, 128)  # what mx.quantize takes

NARROW = 40  # rows up to which a product gives a row the same bits whatever their number (_blas.c)

Packed = tuple[mx.array, ...]  # uint32 (B, H, T, D bits / 32), scales and biases (B, H, T, G)


@dataclass(frozen=True)
class Grid:
    """How the vectors of one layer's keys, or values, are coded."""

    bits: int
    group: int

    def pack(self, x_BHTD: mx.array) -> Packed:
        """Each vector by itself, so tokens can be cut, moved and forgotten afterwards."""
        return tuple(mx.quantize(x_BHTD, group_size=self.group, bits=self.bits))

    def spell_out(self, packed: Packed) -> mx.array:
        """The vectors themselves, (B, H, T, D)."""
        return mx.dequantize(packed[0], packed[1], packed[2], self.group, self.bits)

    def bytes_a_number(self, scale_bytes: int) -> float:
        return self.bits / 8 + 2 * scale_bytes / self.group

    def dots(self, q_BHRD: mx.array, packed: Packed) -> mx.array:
        """q·x for all pairs, (B, H, R, T)."""
        words, scales, biases = packed
        if q_BHRD.dtype != mx.float32:
            return mx.quantized_matmul(q_BHRD, words, scales, biases, True, self.group, self.bits)
        codes = self._codes(words)
        q_BHGRE = self._by_group(q_BHRD)
        lanes = len(codes)
        sums = sum(
            _product(q_BHGRE[..., lane::lanes], code.swapaxes(-1, -2))
            for lane, code in enumerate(codes)
        )
        steps = (sums * scales.swapaxes(-1, -2)[:, :, :, None]).sum(axis=2)
        return steps + q_BHGRE.sum(-1).swapaxes(-1, -2) @ biases.swapaxes(-1, -2)

    def mix(self, p_BHRT: mx.array, packed: Packed) -> mx.array:
        """Σ p x over the keys, (B, H, R, D)."""
        words, scales, biases = packed
        if p_BHRT.dtype != mx.float32:
            return mx.quantized_matmul(p_BHRT, words, scales, biases, False, self.group, self.bits)
        weighted = p_BHRT[:, :, None] * scales.swapaxes(-1, -2)[:, :, :, None]
        lanes = [
            _product(weighted, code) for code in self._codes(words)
        ]  # each (B, H, G, R, E / lanes)
        mixed = mx.stack(lanes, axis=-1).flatten(-2) if len(lanes) > 1 else lanes[0]
        shift = _product(p_BHRT, biases).swapaxes(-1, -2)[..., None]
        return (mixed + shift).swapaxes(2, 3).flatten(-2)

    def _codes(self, packed: mx.array) -> list[mx.array]:
        """Codes as float32 (B, H, G, T, E): one array, or for 4 bits the even and the odd places."""
        octets = self._by_group(mx.view(packed, mx.uint8), self.group * self.bits // 8)
        if octets.shape[2] > 1:  # else the product copies four times as many bytes
            octets = mx.contiguous(octets)
        parts = [octets] if self.bits == 8 else [octets & 15, octets >> 4]
        return [part.astype(mx.float32) for part in parts]

    def _by_group(self, x_BHND: mx.array, size: int = 0) -> mx.array:
        """(B, H, N, D) -> (B, H, G, N, D / G)."""
        return mx.unflatten(x_BHND, -1, (-1, size or self.group)).swapaxes(2, 3)


def _product(a: mx.array, b: mx.array) -> mx.array:
    """a @ b by at most NARROW rows at a time, so that a verify pass rounds as single steps do."""
    rows = a.shape[-2]
    if rows <= NARROW:
        return a @ b
    parts = [a[..., i : i + NARROW, :] @ b for i in range(0, rows, NARROW)]
    return mx.concatenate(parts, axis=-2)
