"""Let a layer's cache say how its keys and values are attended.

mlx-lm's attention modules hand what their cache fetched to one function, which knows plain arrays
and triples of `mx.quantized_matmul`. A cache that stores something else (or reads the triples in a
quicker way) has a method `attend`; modules loaded through here ask it first. So do what it fetched,
for layers without a cache that use another layer's keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.nn as nn

from stages.models.loading.layers import leaves

NAME = "scaled_dot_product_attention"


def route(model: nn.Module) -> None:
    """In the Python modules of this model's layers, put a function in front of mlx-lm's own (or of
    `cpu_math`'s). For caches without `attend` it is that function, so other models do not notice."""
    from mlx_lm.models import base

    for name in {type(module).__module__ for module in model.modules()}:
        theirs = getattr(sys.modules[name], NAME, None)
        ours = getattr(theirs, "asks_cache", False)
        if not ours and getattr(theirs, "theirs", theirs) is getattr(base, NAME):
            setattr(sys.modules[name], NAME, _asking(theirs))


def _asking(theirs: Any) -> Any:
    def attend(
        q: Any, k: Any, v: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> Any:
        plain = partial(theirs, cache=cache, scale=scale, mask=mask, sinks=sinks)
        mine = getattr(cache, "attend", None) or getattr(k, "attend", None)
        if mine is None:
            return plain(q, k, v)
        return mine(plain, q, k, v, scale=scale, mask=mask, sinks=sinks)

    attend.theirs = getattr(theirs, "theirs", theirs)  # type: ignore[attr-defined]
    attend.asks_cache = True  # type: ignore[attr-defined]
    return attend


def watch(caches: Sequence[Any]) -> set[int]:
    """Indices of the caches (composite ones by their parts) that their layer asks, once the model has
    run with them: what it computes by code of its own can only be served from plain arrays."""
    asked: set[int] = set()

    def noted(index: int, plain: Any, q: Any, k: Any, v: Any, **_: Any) -> Any:
        asked.add(index)
        return plain(q, k, v)

    for index, cache in enumerate(leaves(caches)):
        cache.attend = partial(noted, index)
    return asked
