"""Cut any mlx-lm model in two: hidden states, and scores from hidden states.

mlx-lm's classes compute both in one `__call__`, and what happens after the layers differs from
family to family (tied or untied heads, soft caps, scale factors). Instead of a table of families,
the head is the model's own `__call__`, run on a shallow twin whose inner model just returns the
hidden states it is given. So every family's own last steps are applied, by its own code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.errors import OpenError

WRAPPERS = ("language_model",)  # multimodal shells around the text model
TRUNKS = ("model", "transformer", "backbone")


class _Given:
    """Stands where the inner model was: returns `hidden`, and is the inner model otherwise."""

    def __init__(self, trunk: nn.Module):
        self.trunk = trunk
        self.hidden: mx.array | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trunk, name)


class SplitModel:
    """`head(hidden(tokens, caches)) == model(tokens, caches)`; see `verify`."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.owner = _owner(model)
        name = next((n for n in TRUNKS if isinstance(self.owner.get(n), nn.Module)), "")
        if not name:
            raise OpenError(f"{_class(model)} keeps its layers under no name known: {TRUNKS}.")
        self.trunk = self.owner[name]
        self._twin = copy.copy(self.owner)
        self._twin.pop(name)
        self._given = _Given(self.trunk)
        setattr(self._twin, name, self._given)
        if "cache" not in inspect.signature(type(self.trunk).__call__).parameters:
            raise OpenError(f"{_class(self.trunk)} takes no `cache`; it cannot be served.")

    def hidden(self, tokens_BW: mx.array, caches: Sequence[Any] | None) -> mx.array:
        return self.trunk(tokens_BW, cache=caches)

    def head(self, hidden_BWD: mx.array) -> mx.array:
        self._given.hidden = hidden_BWD
        try:
            return self._twin(None)
        finally:
            self._given.hidden = None

    def verify(self, caches: Sequence[Any], reference: Sequence[Any]) -> int:
        """Run one token both ways; the vocabulary size. Leaves one token in all these caches."""
        token, name = mx.zeros((1, 1), mx.int32), _class(self.model)
        try:
            hidden = self.hidden(token, caches)
            split = self.head(hidden)
            whole = self.model(token, cache=reference)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise OpenError(f"{name} cannot be cut before its head: {error}") from error
        if split is hidden:
            raise OpenError(f"{name} computes scores among its layers; it cannot be served.")
        if split.shape != whole.shape or not mx.array_equal(split, whole, equal_nan=True).item():
            raise OpenError(f"{name} gives other scores when cut before its head.")
        return int(whole.shape[-1])


def _owner(model: nn.Module) -> nn.Module:
    """The module whose `__call__` holds both the layers and the head."""
    for name in WRAPPERS:
        if isinstance(inner := model.get(name), nn.Module):
            return _owner(inner)
    return model


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"
