"""Vectors turned by a fixed rotation before they are coded, so that no coordinate stands out.

A rotation changes no dot product: queries are turned instead of turning keys back, and only the mixed
values are turned back, one vector a query (attention is linear in the values).
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import numpy as np

from stages.rows.codes import Codec

Kind = Literal["qr", "hadamard"]
ROUNDS = 2  # of signs and Hadamard: after one, a lone coordinate is still no random direction
SEED = 42
ROOTS = (1, 12, 20, 28)  # Hadamard sizes are these times a power of two


def hadamard_takes(size: int) -> bool:
    """Checked here because MLX's own transform ends the process at a size it does not know."""
    return any(size % root == 0 and _is_power(size // root) for root in ROOTS)


def rotation(kind: Kind, size: int, seed: int = SEED) -> np.ndarray:
    """Orthogonal (size, size), float64; `x @ it` turns x. `qr`: a random rotation (of the Haar
    measure); `hadamard`: random signs and a Hadamard matrix, ROUNDS times."""
    draw = np.random.default_rng(seed)
    if kind == "qr":
        q, r = np.linalg.qr(draw.standard_normal((size, size)))
        return np.asarray(q * np.sign(np.diag(r)))
    turn = np.eye(size)
    for _ in range(ROUNDS):
        turn = (turn * draw.choice([-1.0, 1.0], size)) @ hadamard(size).T / np.sqrt(size)
    return turn


def hadamard(size: int) -> np.ndarray:
    """Rows orthogonal, entries ±1. Doubling (Sylvester) of the matrices of Paley (1933)."""
    assert hadamard_takes(size), size
    root = next(root for root in ROOTS[::-1] if size % root == 0 and _is_power(size // root))
    matrix = {1: lambda: np.ones((1, 1)), 12: lambda: _paley(11), 20: lambda: _paley(19)}.get(
        root, lambda: _paley_symmetric(13)
    )()
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _squares(prime: int) -> np.ndarray:
    """Jacobsthal's matrix: whether j - i is a square modulo the prime (1), not (-1), or 0."""
    squares = {n * n % prime for n in range(1, prime)}
    sign = np.array([0, *(1 if n in squares else -1 for n in range(1, prime))])
    return np.asarray(sign[(np.arange(prime)[None, :] - np.arange(prime)[:, None]) % prime])


def _bordered(prime: int, corner: int) -> np.ndarray:
    core = np.ones((prime + 1, prime + 1))
    core[0, 0], core[1:, 0], core[1:, 1:] = 0, corner, _squares(prime)
    return core


def _paley(prime: int) -> np.ndarray:
    """For primes of the form 4 n + 3: size prime + 1."""
    return np.asarray(_bordered(prime, -1) + np.eye(prime + 1))


def _paley_symmetric(prime: int) -> np.ndarray:
    """For primes of the form 4 n + 1: size 2 (prime + 1)."""
    conference = _bordered(prime, 1)
    return np.asarray(
        np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(prime + 1), [[1, -1], [-1, -1]])
    )


class Turned:
    """A `Codec` that turns vectors of `size` numbers and codes them with another."""

    turns = True

    def __init__(self, inner: Codec, kind: Kind, size: int, seed: int = SEED):
        self.inner = inner
        self.matrix = mx.array(rotation(kind, size, seed).astype(np.float32))

    def pack(self, x_BHTD: mx.array) -> mx.array:
        return self.inner.pack(self.turn(x_BHTD))

    def spell_out(self, rows_BHTW: mx.array) -> mx.array:
        return self.inner.spell_out(rows_BHTW)

    def turn(self, x: mx.array) -> mx.array:
        return (x.astype(mx.float32) @ self.matrix).astype(x.dtype)

    def unturn(self, x: mx.array) -> mx.array:
        return (x.astype(mx.float32) @ self.matrix.T).astype(x.dtype)
