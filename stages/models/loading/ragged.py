"""Whether a family's code runs rows of unequal length: said at open, not at the first two requests.

mlx-lm's models were written for one position for all rows; most of them take an array of positions
(`cache.offset`) as well, some do not (`mx.arange(offset, …)`). Building one such forward tells; it
is not run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from pipeline.errors import OpenError
from pipeline.types import LayerSpec
from stages.models.loading.split import SplitModel
from stages.rows.layouts import LAYOUTS
from stages.rows.rows import LayeredRows


def prove_ragged(split: SplitModel, specs: Sequence[LayerSpec]) -> None:
    """OpenError if a forward over rows of 1, 2, 3, … tokens cannot be built. Layers of another kind are
    left to the KV policy, which refuses them by name. No layer has as many heads as there are rows:
    a mask that is spread over heads instead of rows would pass for right."""
    if any(spec.kind not in LAYOUTS for spec in specs):
        return
    rows = LayeredRows([LAYOUTS[spec.kind](spec, 2) for spec in specs], specs, 2)
    heads = {int(number) for spec in specs for number in re.findall(r"\d+", spec.signature)}
    count = next(n for n in itertools.count(2) if n not in heads)
    rows.prepare_append([None] * count).commit()
    rows.lengths = list(range(1, count + 1))
    round = rows.begin([[3, 5], *[[2]] * (count - 1)])
    try:
        split.hidden(round.tokens_BW, round.caches)
    except Exception as error:
        raise OpenError(
            f"{type(split.model).__module__} does not run on rows of unequal length in one pass: "
            f"{error}. Choose another model."
        ) from error
    finally:
        round.abandon()
