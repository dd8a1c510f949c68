"""Which tokens survive top_k, top_p and min_p: the textbook sets, without sorting the vocabulary.

"Highest" always means by score, and among equal scores the lower id is the higher token. Filters
act one after the other, each on the law its predecessor left: top_p measures its mass within the
top_k tokens, and min_p compares with the best token, which no filter ever cuts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Ids = npt.NDArray[np.int64]


def inverse_temperature(temperature: float) -> np.float32:
    """1 / temperature, bounded so that no temperature makes NaN: a denormal one is as good as greedy."""
    return np.float32(min(max(1.0 / temperature, 1e-30), 1e30))


def down_to(values: Floats, boundary: np.float32, count: int) -> Ids:
    """Indices, ascending, of the `count` highest values, given that the last of them is `boundary`."""
    kept = np.flatnonzero(values >= boundary)
    surplus = len(kept) - count
    if surplus:  # ties at the boundary: the highest indices lose
        ties = np.flatnonzero(values[kept] == boundary)
        kept = np.delete(kept, ties[len(ties) - surplus :])
    return kept


def highest(values: Floats, count: int) -> Ids:
    """Indices, ascending, of the `count` highest values."""
    if count >= len(values):
        return np.arange(len(values))
    return down_to(values, np.partition(values, -count)[-count], count)


def nucleus(values: Floats, scale: np.float32, top_p: float) -> Ids:
    """Indices, ascending, of the fewest highest values whose share of exp(scale * value) reaches
    `top_p`.

    Only values above a floor are sorted: first above a thousandth of the mass, which is most often
    enough; then above (1 - top_p) / N of it, because all below together hold less than 1 - top_p;
    and should rounding say otherwise, all.
    """
    peak = values.max()
    weights = (values - peak) * scale
    goal = top_p * float(np.exp(weights, out=weights).sum(dtype=np.float64))
    for share in (1e-3, (1.0 - top_p) / len(values), 0.0):
        floor = float(peak) + math.log(max(share * goal, 1e-300)) / float(scale)
        ordered = np.sort(values[values >= np.float32(floor)] if share else values)[::-1]
        mass = np.cumsum(np.exp((ordered - peak) * scale), dtype=np.float64)
        if mass.size and mass[-1] >= goal:
            break
    last = min(int(np.searchsorted(mass, goal)), len(ordered) - 1)
    return down_to(values, ordered[last], last + 1)


def survivors(logits_V: Floats, scale: np.float32, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids, ascending, that may be drawn. `scale` is the inverse temperature; never empty."""
    ids, values = None, logits_V
    if top_k:
        ids, values = _narrow(ids, values, highest(values, top_k))
    if top_p < 1.0:
        ids, values = _narrow(ids, values, nucleus(values, scale, top_p))
    if min_p > 0.0:
        likely = np.exp((values - values.max()) * scale) >= np.float32(min_p)
        ids, values = _narrow(ids, values, np.flatnonzero(likely))
    return np.arange(len(logits_V)) if ids is None else ids


def _narrow(ids: Ids | None, values: Floats, kept: Ids) -> tuple[Ids, Floats]:
    return kept if ids is None else ids[kept], values[kept]
