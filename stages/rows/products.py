"""Products with coded vectors that never spell the vectors out.

A group of E numbers of a vector is stored as codes c with one scale s, and perhaps one bias b:
x = s c + b. So q·x = s (q·c) + b Σq, and Σ p x = (Σ p s c) + Σ p b: what is made for the time of one
product are the codes of one layer as float32.

Why not `mx.quantized_matmul` everywhere: on a CPU in float32 it took 3 to 5 times as long as these
products, which go to BLAS (4,096 keys, 3 heads of 64, width 9: 43 against 10 ms).

Legend: B rows, H heads of keys, R queries a head, T keys, D head size, G groups of E numbers in D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

NARROW = 40  # rows up to which a product gives a row the same bits whatever their number (_blas.c)

Packed = tuple[mx.array, ...]  # what is stored of vectors (B, H, T, …), an array a name


class Codec(Protocol):
    """How the vectors of one layer's keys, or values, are stored: each by itself, so that tokens can
    be cut, moved and forgotten afterwards."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays it stores."""

    def pack(self, x_BHTD: mx.array) -> Packed: ...
    def spell_out(self, packed: Packed) -> mx.array:
        """The vectors themselves, (B, H, T, D)."""

    def dots(self, q_BHRD: mx.array, packed: Packed) -> mx.array:
        """q·x for all pairs, (B, H, R, T)."""

    def mix(self, p_BHRT: mx.array, packed: Packed) -> mx.array:
        """Σ p x over the keys, (B, H, R, D)."""


def dots(
    q_BHRD: mx.array, codes: Sequence[mx.array], scales: mx.array, biases: mx.array | None = None
) -> mx.array:
    """(B, H, R, T). `codes` are float32 (B, H, G, T, E / lanes): lane i holds every lanes-th number of
    a group from the i-th; scales and biases are (B, H, T, G)."""
    q_BHGRE = by_group(q_BHRD, q_BHRD.shape[-1] // scales.shape[-1])
    lanes = len(codes)
    sums = sum(
        narrow(q_BHGRE[..., lane::lanes], code.swapaxes(-1, -2)) for lane, code in enumerate(codes)
    )
    steps = (sums * scales.swapaxes(-1, -2)[:, :, :, None]).sum(axis=2)
    if biases is None:
        return steps
    return steps + q_BHGRE.sum(-1).swapaxes(-1, -2) @ biases.swapaxes(-1, -2)


def mix(
    p_BHRT: mx.array, codes: Sequence[mx.array], scales: mx.array, biases: mx.array | None = None
) -> mx.array:
    """(B, H, R, D), of codes as `dots` takes them."""
    weighted = p_BHRT[:, :, None] * scales.swapaxes(-1, -2)[:, :, :, None]
    lanes = [narrow(weighted, code) for code in codes]  # each (B, H, G, R, E / lanes)
    mixed = mx.stack(lanes, axis=-1).flatten(-2) if len(lanes) > 1 else lanes[0]
    if biases is not None:
        mixed = mixed + narrow(p_BHRT, biases).swapaxes(-1, -2)[..., None]
    return mixed.swapaxes(2, 3).flatten(-2)


def by_group(x_BHND: mx.array, size: int) -> mx.array:
    """(B, H, N, D) -> (B, H, D / size, N, size)."""
    return mx.unflatten(x_BHND, -1, (-1, size)).swapaxes(2, 3)


def narrow(a: mx.array, b: mx.array) -> mx.array:
    """a @ b by at most NARROW rows at a time, so that a verify pass rounds as single steps do."""
    rows = a.shape[-2]
    if rows <= NARROW:
        return a @ b
    parts = [a[..., i : i + NARROW, :] @ b for i in range(0, rows, NARROW)]
    return mx.concatenate(parts, axis=-2)
