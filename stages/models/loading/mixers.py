"""Let the mixers of recurrent layers (gated delta, SSM, short convolution) run once more.

A recurrent state cannot be cut back. What it was computed from can be kept instead: a mixer's
inputs depend on nothing but the positions they belong to, so calling it again with the state of a
round's start and a mask over the tokens that were kept gives the state after exactly those. mlx-lm's
mixers tell nobody what they are given; so their class is replaced by a subclass of the same name
that tells the cache first. The module tree and the names of weights stay as they are.

mlx-lm's models differ in what they do with padding (`ArraysCache.lengths`, the mask): some of them
ignore it. `make_replayable` therefore proves both on a few tokens, once, before anything is served.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.errors import OpenError
from stages.models.loading.layers import leaves
from stages.models.loading.split import SplitModel

Caches = Sequence[Any]
TOKENS, KEPT = (3, 5, 2, 7), 2
TOLERANCE = (
    0.02  # of the largest value: 16-bit products of other widths differ, ignored padding more
)


class _Telling:
    """In front of a mixer's own class; `_signature` is that of its `__call__`."""

    _signature: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        given = self._signature.bind(self, *args, **kwargs).arguments
        if (record := getattr(given.get("cache"), "record", None)) is not None:
            record(lambda mask, cache: _again(call, given, mask, cache))
        return call(*args, **kwargs)


def _again(call: Callable[..., Any], given: dict[str, Any], mask: Any, cache: Any) -> None:
    changed = given | {"mask": mask, "cache": cache}
    call(**{name: value for name, value in changed.items() if name != "self"})


def make_replayable(split: SplitModel, make_caches: Callable[[], Caches]) -> None:
    """Make the model's mixers tell their inputs; OpenError naming the layers where that, or padding,
    does not work."""
    for module in _consumers(split.trunk):
        own = type(module)
        members = {"_signature": inspect.signature(own.__call__), "__module__": own.__module__}
        object.__setattr__(module, "__class__", type(own.__name__, (_Telling, own), members))
    _prove(split, make_caches)


def _consumers(trunk: nn.Module) -> list[nn.Module]:
    """The innermost modules that take a cache and a mask."""
    modules = [module for _, module in trunk.named_modules() if module is not trunk]
    taking = [module for module in modules if _takes(module)]
    return [m for m in taking if not any(_takes(c) for _, c in m.named_modules() if c is not m)]


def _takes(module: nn.Module) -> bool:
    return {"cache", "mask"} <= set(inspect.signature(type(module).__call__).parameters)


def _prove(split: SplitModel, make_caches: Callable[[], Caches]) -> None:
    """A few tokens alone, the same before padding, and the same kept of a longer round."""
    alone, padded, again = make_caches(), make_caches(), make_caches()
    split.hidden(mx.array([TOKENS[:KEPT]]), alone)
    told = _listen(padded, split)
    wrong = _differing(alone, padded)
    _complain(split, wrong, "let padding into their state, so rows cannot share a pass")
    for index, cache in _recurrent(again):
        cache.lengths = mx.array([KEPT])
        for call in told[index]:
            call(mx.arange(len(TOKENS))[None] < KEPT, cache)
    wrong = [index for index, cache in _recurrent(again) if not told[index]]
    _complain(split, wrong or _differing(alone, again), "cannot be rolled back")


def _listen(caches: Caches, split: SplitModel) -> dict[int, list[Any]]:
    """Run all `TOKENS`, of which only the first `KEPT` are real; what each mixer told its cache."""
    told: dict[int, list[Any]] = {}
    for index, cache in _recurrent(caches):
        cache.lengths, told[index] = mx.array([KEPT]), []
        cache.record = told[index].append
    split.hidden(mx.array([TOKENS]), caches)
    return told


def _recurrent(caches: Caches) -> list[tuple[int, Any]]:
    """(position among all caches, cache) of those that hold arrays without a token axis."""
    return [(i, c) for i, c in enumerate(leaves(caches)) if hasattr(c, "lengths")]


def _differing(one: Caches, other: Caches) -> list[int]:
    """Positions of caches whose arrays are not close."""
    pairs = zip(_recurrent(one), _recurrent(other), strict=True)
    return [index for (index, a), (_, b) in pairs if not all(map(_close, a.cache, b.cache))]


def _close(one: mx.array, other: mx.array) -> bool:
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    limit = TOLERANCE * mx.abs(one).max() + 1e-6
    return bool((mx.abs(one - other).max() <= limit).item())


def _complain(split: SplitModel, layers: list[int], what: str) -> None:
    if layers:
        raise OpenError(
            f"{type(split.model).__module__}: the recurrent layers {layers} {what}. mlx-lm's code of "
            f"this family does not support it. Choose another model."
        )
