"""Gumbel noise as a pure function of (seed, position, token id).

A counter-based generator instead of a stream: the noise of one id does not depend on which other
ids are asked for, on how many draws came before, or on the batch. So filters may cut candidates
before any noise is made, and a proposal that is rejected costs no noise.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
2014): the id is the counter, (seed, position) the starting state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_POSITION_STEP = 0xD1342543DE82EF95  # odd: distinct positions never share a state


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX[0]) & _WORD
    word = ((word ^ (word >> 27)) * _MIX[1]) & _WORD
    return word ^ (word >> 31)


def uniform(seed: int, position: int, ids_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) for each id, of 52 bits."""
    state = _mix((_mix(seed & _WORD) + position * _POSITION_STEP) & _WORD)
    word = ids_N.astype(np.uint64)
    word += np.uint64(1)
    word *= np.uint64(_GOLDEN)
    word += np.uint64(state)
    shifted = word >> np.uint64(30)
    word ^= shifted
    word *= np.uint64(_MIX[0])
    word ^= np.right_shift(word, np.uint64(27), out=shifted)
    word *= np.uint64(_MIX[1])
    word ^= np.right_shift(word, np.uint64(31), out=shifted)
    word >>= np.uint64(12)
    number = word.astype(np.float64)
    number += 0.5
    number *= 2.0**-52
    return number


def gumbel(seed: int, position: int, ids_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each id: argmax(log p + noise) is a draw from p."""
    noise = uniform(seed, position, ids_N)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
