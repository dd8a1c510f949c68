"""What a drafter may see of a target: outputs of chosen layers, and its embedding with its scale.

mlx-lm's models hand out neither. So the class of each layer is replaced, once somebody asks, by a
subclass of the same name that notes what it returns; the module tree and the names of weights stay
as they are. The embedding is what the first layer is given: every family's own multiplier is in it,
by its own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.errors import OpenError
from pipeline.types import AFTER_NORM, EMBEDDING
from stages.models.loading.split import SplitModel

LAYERS = ("layers", "h", "blocks")


class _FirstInput(Exception):
    """Carries what the first layer was given."""


class _Tape:
    """What the layers' classes write to."""

    def __init__(self) -> None:
        self.noted: dict[int, mx.array] = {}  # tap -> (B, W, D)
        self.wanted: frozenset[int] = frozenset()
        self.stop = False

    def called(self, index: int, given: Any) -> None:
        if index == 0 and self.stop:
            raise _FirstInput(given)
        if index == 0 and EMBEDDING in self.wanted:
            self.noted[EMBEDDING] = given

    def returned(self, index: int, output: Any) -> None:
        if index in self.wanted:
            self.noted[index] = output[0] if isinstance(output, tuple) else output


class _Noting:
    """In front of a layer's own class."""

    _tape: _Tape
    _index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._tape.called(self._index, args[0] if args else next(iter(kwargs.values())))
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._tape.returned(self._index, output)
        return output


class TappedModel:
    """The taps of one split model. Costs a Python call a layer, and only once they were asked for."""

    def __init__(self, split: SplitModel):
        self.split = split
        name = next((n for n in LAYERS if isinstance(split.trunk.get(n), list)), "")
        self.layers: list[nn.Module] = split.trunk[name] if name else []
        self._tape: _Tape | None = None

    def hidden(
        self, tokens_BW: Any, caches: Sequence[Any] | None, taps: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """(hidden_BWD after the last norm, taps' outputs side by side (B, W, D * taps)). Lazy."""
        tape = self._recording()
        tape.wanted, tape.noted = frozenset(taps), {}
        try:
            hidden_BWD = self.split.hidden(tokens_BW, caches)
            noted = tape.noted | {AFTER_NORM: hidden_BWD}
        finally:
            tape.wanted, tape.noted = frozenset(), {}
        if missing := [tap for tap in taps if tap not in noted]:
            raise OpenError(f"The model has layers 0..{len(self.layers) - 1}; no tap {missing}.")
        seen = [noted[tap] for tap in taps]
        return hidden_BWD, mx.concatenate(seen, -1) if len(seen) > 1 else seen[0]

    def embed(self, tokens_BW: Any) -> mx.array:
        """What the first layer is given for these tokens, (B, W, D). Lazy; no layer is run."""
        tape = self._recording()
        tape.stop = True
        try:
            self.split.hidden(tokens_BW, None)
        except _FirstInput as found:
            given: mx.array = found.args[0]
            return given
        finally:
            tape.stop = False
        raise OpenError("The model calls no layer; nothing can be seen of it.")

    def _recording(self) -> _Tape:
        if self._tape is None:
            self._tape = _Tape()
            for index, layer in enumerate(self.layers):
                own = type(layer)
                members = {"_tape": self._tape, "_index": index, "__module__": own.__module__}
                noting = type(own.__name__, (_Noting, own), members)
                object.__setattr__(layer, "__class__", noting)
        return self._tape
