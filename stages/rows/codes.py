"""Vectors stored as codes: what a codec is, how a vector lies in memory, and how it is spelled out.

A vector is one row of 32-bit words: its codes end to end, the lowest bits first, up to a whole word,
then, in the model's own type, the scales of its groups of numbers, and their biases if there are any.
It is spelled out again each time it is attended, for one layer at a time: in float32 by our BLAS
(stages/_blas.c), which has a door for that; four times as long, by MLX, where ours is not in use.
"""

from __future__ import annotations

import math
from typing import Protocol

import mlx.core as mx
import numpy as np

OCTET = 8  # codes that make a whole number of bytes, whatever their bits


class Codec(Protocol):
    """How the vectors of one layer's keys, or values, are stored: each by itself, so that tokens can
    be cut, moved and forgotten afterwards. It may code a turned vector (`turned.Turned`)."""

    turns: bool

    def pack(self, x_BHTD: mx.array) -> mx.array:
        """uint32 (B, H, T, words)."""

    def spell_out(self, rows_BHTW: mx.array) -> mx.array:
        """The vectors as they were coded, (B, H, T, D): turned, if this codec turns."""

    def turn(self, x: mx.array) -> mx.array: ...
    def unturn(self, x: mx.array) -> mx.array: ...


class Straight:
    """A codec that turns nothing."""

    turns = False

    def turn(self, x: mx.array) -> mx.array:
        return x

    def unturn(self, x: mx.array) -> mx.array:
        return x


class Door:
    """Asks our BLAS for vectors of `size` numbers in groups of `group`. A code stands for itself, or
    for one of `levels`; in the first case groups have biases."""

    def __init__(self, bits: int, group: int, size: int, levels: np.ndarray | None = None):
        self.words = code_words(bits, size)
        kept = size // group * (2 if levels is None else 1)
        said = np.array(
            [
                bits,
                group,
                0 if levels is None else len(levels),
                *(levels if levels is not None else ()),
            ]
        )
        header = np.zeros((self.words + kept) * size, np.float32)
        self.fits = len(said) <= len(header)
        header[: len(said)] = said[: len(header)]
        self.header = mx.array(header.reshape(1, 1, self.words + kept, size))
        row = mx.concatenate([mx.zeros(self.words), mx.ones(kept)])[None, None, None]
        first = 1.0 if levels is None else float(np.float32(levels[0]))
        self.is_open = self.fits and bool((self._ask(row) == first).all())

    def _ask(self, rows: mx.array) -> mx.array:
        return mx.addmm(mx.array(0.0), rows, self.header, alpha=math.nan, beta=-1.0)

    def spell_out(self, rows_BHTW: mx.array) -> mx.array:
        return self._ask(rows_BHTW.view(mx.float32))


def code_words(bits: int, size: int) -> int:
    """Words that the codes of a vector take."""
    return -(-size * bits // 32)


def row_words(bits: int, size: int, scales: int, item_bytes: int) -> int:
    """Words of a stored vector with so many scales and biases."""
    return code_words(bits, size) + -(-scales * item_bytes // 4)


def joined(words: mx.array, *scales: mx.array) -> mx.array:
    """uint32 (…, words) of codes and arrays (…, G) of one type."""
    kept = mx.concatenate(list(scales), axis=-1)
    if kept.shape[-1] * kept.itemsize % 4:
        kept = mx.concatenate([kept, mx.zeros_like(kept[..., :1])], axis=-1)
    return mx.concatenate([words, kept.view(mx.uint32)], axis=-1)


def pack(codes: mx.array, bits: int) -> mx.array:
    """uint32 (…, code words) of codes uint8 (…, D); D is a multiple of 8."""
    eights = mx.unflatten(codes.astype(mx.uint64), -1, (-1, OCTET)) << _shifts(bits)
    octets = eights.sum(-1)[..., None].view(mx.uint8)[..., :bits].flatten(-2)
    missing = -octets.shape[-1] % 4
    if missing:
        octets = mx.concatenate([octets, mx.zeros_like(octets[..., :missing])], axis=-1)
    return octets.view(mx.uint32)


def unpack(words: mx.array, bits: int, size: int) -> mx.array:
    """Codes (…, size) of `pack`."""
    octets = mx.unflatten(words.view(mx.uint8)[..., : size * bits // 8], -1, (-1, bits))
    blank = mx.zeros((*octets.shape[:-1], OCTET - bits), mx.uint8)
    eights = mx.concatenate([octets, blank], axis=-1).view(mx.uint64)
    return ((eights >> _shifts(bits)) & mx.array(2**bits - 1, mx.uint64)).flatten(-2)


def _shifts(bits: int) -> mx.array:
    return mx.array(bits * np.arange(OCTET), mx.uint64)
