"""Where two answers part: by a rounding, or by a fault.

A forward of one token and one of nine may round differently, and under a policy that codes keys and
values a rounding moves a code. Such a parting is told from a fault by measuring both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

WIDTH = 9


def within_rounding(
    parts: Mapping[str, Any], prompt: Sequence[int], one: Sequence[int], two: Sequence[int]
) -> bool:
    """Whether the two tokens where the answers part have scores as near as 2x what the width of a
    forward changes in them. Runs on the engine's owner thread (`engine.exclusive`)."""
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    scores = partial(_scores, parts, [*prompt, *one[:at]])
    ways = [scores(width) for width in (1, WIDTH, len(prompt) + at + 48)]
    noise = max(float(np.abs(way - ways[0]).max()) for way in ways)
    return bool(abs(ways[0][one[at]] - ways[0][two[at]]) <= 2 * noise)


def _scores(parts: Mapping[str, Any], ids: Sequence[int], width: int) -> np.ndarray:
    """Scores (V,) after `ids`, read `width` at a time."""
    model = parts["model"]
    rows = parts["kv"].rows(model, WIDTH)
    rows.prepare_append([None]).commit()
    for start in range(0, len(ids), width):
        fed = ids[start : start + width]
        round = rows.begin([[*fed, *[0] * (width - len(fed))]])
        last = model.head(model.hidden(round.tokens_BW, round.caches))[0, len(fed) - 1]
        round.launch(last)
        round.resolve([len(fed)])
    rows.close()
    return np.asarray(last)
