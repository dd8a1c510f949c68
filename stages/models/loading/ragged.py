"""Whether a family's code runs rows of unequal length: said at open, not at the first two requests.

mlx-lm's models were written for one position for all rows; most of them take an array of positions
(`cache.offset`) as well, some do not (`mx.arange(offset, …)`). Building one such forward tells; it
is not run.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import OpenError
from pipeline.types import LayerSpec
from stages.models.loading.split import SplitModel
from stages.rows.layouts import LAYOUTS
from stages.rows.rows import LayeredRows


def prove_ragged(split: SplitModel, specs: Sequence[LayerSpec]) -> None:
    """OpenError if a forward over rows of 1 and 3 tokens cannot be built. Layers of another kind are
    left to the KV policy, which refuses them by name."""
    if any(spec.kind not in LAYOUTS for spec in specs):
        return
    rows = LayeredRows([LAYOUTS[spec.kind](spec, 2) for spec in specs], specs, 2)
    rows.prepare_append([None, None]).commit()
    rows.lengths = [1, 3]
    round = rows.begin([[3, 5], [2]])
    try:
        split.hidden(round.tokens_BW, round.caches)
    except Exception as error:
        raise OpenError(
            f"{type(split.model).__module__} does not run on rows of unequal length in one pass: "
            f"{error}. Choose another model."
        ) from error
    finally:
        round.abandon()
