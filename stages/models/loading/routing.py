"""Let a layer's cache say how its keys and values are attended.

mlx-lm's attention modules hand what their cache fetched to one function, which knows plain arrays
and triples of `mx.quantized_matmul`. A cache that stores something else (or reads the triples in a
quicker way) has a method `attend`; modules loaded through here ask it first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.nn as nn

NAME = "scaled_dot_product_attention"


def route(model: nn.Module) -> None:
    """In the Python modules of this model's layers, put a function in the place of mlx-lm's own.
    For caches without `attend` it is that function, so other models do not notice."""
    from mlx_lm.models import base

    plain = base.scaled_dot_product_attention

    def attend(
        queries: Any, keys: Any, values: Any, cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        mine = getattr(cache, "attend", None)
        if mine is not None:
            return mine(queries, keys, values, *args, **kwargs)
        return plain(queries, keys, values, cache, *args, **kwargs)

    for name in {type(module).__module__ for module in model.modules()}:
        if getattr(sys.modules[name], NAME, None) is plain:
            setattr(sys.modules[name], NAME, attend)


def watch(caches: Sequence[Any]) -> set[int]:
    """Indices of the caches that their layer asks, once the model has run with them: what a model
    computes by code of its own can only be served from plain arrays."""
    from mlx_lm.models.base import scaled_dot_product_attention

    asked: set[int] = set()

    def noted(index: int, queries: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        asked.add(index)
        return scaled_dot_product_attention(queries, keys, values, None, *args, **kwargs)

    for index, cache in enumerate(caches):
        cache.attend = partial(noted, index)
    return asked
