"""What one linear layer adds to its rows: y + (x A) B, each row by its own A and B, in one pass.

The product with the layer's own weights is made once for all rows, as without adapters; the small
products are made row by row (`mx.gather_mm`), each of its own adapter's shape. So a row's numbers do not
depend on what its neighbours wear, and a row that wears nothing gets exactly the layer's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.types import Worn
from stages.models.loading.row_adapters import Places, RowAdapters


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to one layer: x A B + gain (y - bias). Its scale is in B, and so is DoRA's.

    DoRA (arXiv 2402.09353) gives each output a length m: out = m / |W + BA| (x W + x A B) + bias. That is
    this form with gain = m / |W + BA| - 1 and B multiplied by m / |W + BA|.
    """

    a_DR: mx.array
    b_RO: mx.array
    gain_O: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        found = [self.a_DR, self.b_RO, self.gain_O]
        return [array for array in found if array is not None]

    @property
    def kind(self) -> Any:
        """Only what agrees in this is stacked: padding would change how products are summed."""
        return (self.gain_O is None, *((a.shape, str(a.dtype)) for a in self.arrays))


@dataclass(frozen=True)
class Stack:
    """Deltas of one kind. Immutable: a pass that is still computing keeps what it was built with."""

    digests: Worn
    a_SDR: mx.array
    b_SRO: mx.array
    gain_SO: mx.array | None

    @staticmethod
    def of(digest: str, delta: Delta) -> Stack:
        gain = None if delta.gain_O is None else delta.gain_O[None]
        return Stack((digest,), delta.a_DR[None], delta.b_RO[None], gain)

    def joined(self, other: Stack) -> Stack:
        pairs = zip(self.arrays, other.arrays, strict=True)
        return self._with(
            (*self.digests, *other.digests), [mx.concatenate(list(pair)) for pair in pairs]
        )

    def without(self, digest: str) -> Stack:
        stay = [slot for slot, known in enumerate(self.digests) if known != digest]
        kept = [array[mx.array(stay)] for array in self.arrays]
        return self._with(tuple(self.digests[slot] for slot in stay), kept)

    @property
    def arrays(self) -> list[mx.array]:
        found = [self.a_SDR, self.b_SRO, self.gain_SO]
        return [array for array in found if array is not None]

    def _with(self, digests: Worn, arrays: list[mx.array]) -> Stack:
        gain = arrays[2] if len(arrays) > 2 else None
        return replace(self, digests=digests, a_SDR=arrays[0], b_SRO=arrays[1], gain_SO=gain)

    def add(self, x_BWD: mx.array, own_BWO: mx.array, bias_O: Any, places: Places) -> mx.array:
        """What the rows that have a place here are given, for all rows, (B, W, O)."""
        slots = places.slots_B
        low_BWR = mx.gather_mm(x_BWD, self.a_SDR, rhs_indices=slots)
        more_BWO = mx.gather_mm(low_BWR, self.b_SRO, rhs_indices=slots)
        if self.gain_SO is not None:
            free = own_BWO if bias_O is None else own_BWO - bias_O
            more_BWO = more_BWO + self.gain_SO[slots][:, None] * free
        return more_BWO.astype(own_BWO.dtype)


class Site:
    """One layer's part of all that is mounted."""

    def __init__(self, name: str, rows: RowAdapters):
        self.name, self.rows = name, rows
        self.stacks: dict[Any, Stack] = {}
        self.asked = 0  # passes in which somebody's adapter was looked for here

    def stacked(self, digest: str, delta: Delta) -> dict[Any, Stack]:
        """The stacks as they are with one more; nothing changes yet."""
        new, old = Stack.of(digest, delta), self.stacks.get(delta.kind)
        return {**self.stacks, delta.kind: old.joined(new) if old else new}

    def drop(self, digest: str) -> None:
        left = {
            kind: stack.without(digest) if digest in stack.digests else stack
            for kind, stack in self.stacks.items()
            if stack.digests != (digest,)
        }
        mx.eval([stack.arrays for stack in left.values()])
        self.stacks = left

    def added(self, x_BWD: mx.array, own_BWO: mx.array, bias_O: Any) -> mx.array:
        """The layer's own output with what each row wears. ValueError where rows cannot be told apart."""
        if not self.stacks:  # what was here is unmounted, or was refused
            return own_BWO
        rows = len(self.rows.rows)
        if x_BWD.ndim != 3 or x_BWD.shape[0] != rows:
            raise ValueError(
                f"{self.name} is given {x_BWD.shape} for {rows} rows: they are not apart there"
            )
        self.asked += 1
        sum_BWO = own_BWO
        for turn in range(self.rows.turns):
            for stack in self.stacks.values():
                if (places := self.rows.places(stack.digests, turn)) is not None:
                    more = sum_BWO + stack.add(x_BWD, own_BWO, bias_O, places)
                    mask = places.mask_B11
                    sum_BWO = more if mask is None else mx.where(mask, more, sum_BWO)
        return sum_BWO


class _Adapted:
    """In front of a linear layer's own class."""

    _site: Site

    def __call__(self: Any, x: mx.array) -> mx.array:
        own = super().__call__(x)  # type: ignore[misc]
        return self._site.added(x, own, self.get("bias")) if self._site.rows.rows else own


def put_site(module: nn.Module, name: str, rows: RowAdapters) -> Site:
    """The module's site, made where there is none: its class is replaced by a subclass of the same name,
    so the module tree and the names of weights stay as they are."""
    own = type(module)
    if not issubclass(own, _Adapted):
        members = {"_site": Site(name, rows), "__module__": own.__module__}
        object.__setattr__(module, "__class__", type(own.__name__, (_Adapted, own), members))
    site: Site = type(module)._site
    return site
