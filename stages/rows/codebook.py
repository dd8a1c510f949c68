"""Lloyd-Max codebooks: the levels that code a coordinate of a random direction best.

A coordinate t of a vector that is uniform on the unit sphere of dimension d has the density
Γ(d/2) / (√π Γ((d-1)/2)) · (1 - t²)^((d-3)/2). The best 2^b levels for it (least squared error) are
each the mean of what is nearest to it (Lloyd, 1982; Max, 1960). TurboQuant (arXiv 2504.19874) codes
the coordinates of rotated vectors so.
"""

from __future__ import annotations

import numpy as np

POINTS = 40_001  # of the quadrature over [-1, 1]
ROUNDS = 3_000  # of Lloyd's iteration; it ends earlier once nothing moves


def levels(bits: int, dimension: int) -> np.ndarray:
    """The 2^bits levels, rising, float64. `dimension` at least 4."""
    grid, mass, moment, cube_root = _integrals(dimension)
    quantiles = (np.arange(2**bits) + 0.5) / 2**bits
    centers = np.interp(quantiles, cube_root / cube_root[-1], grid)  # where many levels end up
    for _ in range(ROUNDS):
        edges = np.concatenate([[-1.0], (centers[1:] + centers[:-1]) / 2, [1.0]])
        masses = np.diff(np.interp(edges, grid, mass))
        moved = np.diff(np.interp(edges, grid, moment)) / np.maximum(masses, 1e-300)
        moved = (moved - moved[::-1]) / 2  # exactly symmetric, as the density is
        if np.abs(moved - centers).max() < 1e-12:
            break
        centers = moved
    return centers


def _integrals(dimension: int) -> tuple[np.ndarray, ...]:
    """Points, and the integrals up to them of the density, of t times it and of its cube root (not
    normalized)."""
    reach = min(1.0, 12 / np.sqrt(dimension))  # beyond it there is nothing
    grid = np.linspace(-reach, reach, POINTS)
    density = np.maximum(0.0, 1 - grid**2) ** ((dimension - 3) / 2)
    steps = np.diff(grid)

    def up_to(f: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum((f[1:] + f[:-1]) / 2 * steps)])

    return grid, up_to(density), up_to(density * grid), up_to(np.cbrt(density))
