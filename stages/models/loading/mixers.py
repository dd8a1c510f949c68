"""Let the mixers of recurrent layers (gated delta, SSM, short convolution) run once more.

A recurrent state cannot be cut back. What it was computed from can be kept instead: a mixer's
inputs depend on nothing but the positions they belong to, so calling it again with the state of a
round's start and a mask over the tokens that were kept gives the state after exactly those. mlx-lm's
mixers tell nobody what they are given; so their class is replaced by a subclass of the same name
that tells the cache first. The module tree and the names of weights stay as they are.

mlx-lm's models differ in what they do with padding (`ArraysCache.lengths`, the mask): some of them
ignore it (0.32: nemotron_h, jamba, rwkv7), and their rows are then run again one by one. Which of
the two, and that it works at all, is tried on a few tokens before anything is served.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.errors import OpenError
from pipeline.types import Worn
from stages.models.loading.layers import leaves
from stages.models.loading.row_adapters import RowAdapters
from stages.models.loading.split import SplitModel

Caches = Sequence[Any]
TOKENS, KEPT = (3, 5, 2, 7), 2
# Of the largest value: 16-bit products of other widths differ by less, ignored padding by more.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Call:
    """One call of a mixer, to be made again. `deaf`: its state lets padding in, so a row has to be
    run by itself."""

    run: Callable[..., Any]
    given: Mapping[str, Any]
    deaf: bool
    adapters: RowAdapters
    rows: tuple[Worn, ...]  # what they wore; empty: nothing

    def masked(self, mask_BW: Any, cache: Any) -> None:
        """All rows at once, each as far as the mask goes."""
        self._run(dict(self.given) | {"mask": mask_BW}, cache, self.rows)

    def alone(self, row: int, width: int, cache: Any) -> None:
        """The first `width` inputs of one row. A mixer's first array is what it mixes, (B, W, D);
        others of that size go with it, and those of one number a row."""
        size = next(a.shape[:2] for a in self.given.values() if _by_token(a))
        cut = dict(self.given)
        for name, a in self.given.items():
            if _by_token(a) and a.shape[:2] == size:
                cut[name] = a[row : row + 1, :width]
            elif isinstance(a, mx.array) and a.shape == size[:1]:
                cut[name] = a[row : row + 1]
        self._run(cut | {"mask": None}, cache, self.rows[row : row + 1])

    def _run(self, given: dict[str, Any], cache: Any, rows: Sequence[Worn]) -> None:
        changed = given | {"cache": cache}
        with self.adapters.worn(rows):
            self.run(**{name: value for name, value in changed.items() if name in self.given})


def _by_token(argument: Any) -> bool:
    return isinstance(argument, mx.array) and argument.ndim > 1


class _Telling:
    """In front of a mixer's own class; `_signature` is that of its `__call__`."""

    _signature: inspect.Signature
    _adapters: RowAdapters
    _deaf = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # type: ignore[misc]
        bound = self._signature.bind(self, *args, **kwargs)
        if (record := getattr(bound.arguments.get("cache"), "record", None)) is not None:
            bound.apply_defaults()
            given = {k: v for k, v in bound.arguments.items() if k != "self"}
            record(Call(run, given, self._deaf, self._adapters, self._adapters.rows))
        return run(*args, **kwargs)


def make_replayable(
    split: SplitModel, make_caches: Callable[[], Caches], adapters: RowAdapters
) -> None:
    """Make the model's mixers tell their inputs; OpenError naming the layers that even so cannot be
    brought to the state after fewer tokens."""
    telling = _consumers(split.trunk)
    for module in telling:
        own = type(module)
        members = {"_signature": inspect.signature(own.__call__), "__module__": own.__module__}
        members |= {"_adapters": adapters}
        object.__setattr__(module, "__class__", type(own.__name__, (_Telling, own), members))
    alone, padded, again = make_caches(), make_caches(), make_caches()
    split.hidden(mx.array([TOKENS[:KEPT]]), alone)
    told = _listen(padded, split)
    if deaf := bool(_differing(alone, padded)):
        for module in telling:
            object.__setattr__(module, "_deaf", True)
    _replay(again, told, deaf)
    wrong = [index for index, calls in told.items() if not calls] or _differing(alone, again)
    if wrong:
        raise OpenError(
            f"{type(split.model).__module__}: the recurrent layers {wrong} cannot be rolled back: "
            f"their state depends on more than what their mixer is given. Choose another model."
        )


def _consumers(trunk: nn.Module) -> list[nn.Module]:
    """The innermost modules that take a cache."""
    modules = [module for _, module in trunk.named_modules() if module is not trunk]
    taking = [module for module in modules if _takes(module)]
    return [m for m in taking if not any(_takes(c) for _, c in m.named_modules() if c is not m)]


def _takes(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def _replay(caches: Caches, told: Mapping[int, list[Call]], deaf: bool) -> None:
    mask = mx.arange(len(TOKENS))[None] < KEPT
    for index, cache in _recurrent(caches):
        cache.lengths = None if deaf else mx.array([KEPT])
        for call in told[index]:
            call.alone(0, KEPT, cache) if deaf else call.masked(mask, cache)


def _listen(caches: Caches, split: SplitModel) -> dict[int, list[Call]]:
    """Run all `TOKENS`, of which only the first `KEPT` are real; what each mixer told its cache."""
    told: dict[int, list[Call]] = {}
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
