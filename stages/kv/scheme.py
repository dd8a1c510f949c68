"""How keys, or values, are to be coded, whatever the size of a model's heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from stages.rows.codes import Codec, row_words
from stages.rows.grid import GROUPS, KERNELS, Grid
from stages.rows.levels import BITS, Levels
from stages.rows.turned import Kind, Turned, hadamard_takes


@dataclass(frozen=True)
class Scheme:
    """`name` is the setting that says the bits; `group` numbers share a scale, None: all of a head;
    `levels`: Lloyd-Max codes, else affine ones; `rotation` comes before either."""

    name: str
    bits: int
    group: int | None
    levels: bool = False
    rotation: Kind | None = None

    def refusal(self) -> str:
        """What is wrong with it for any model, as `setting: …`; empty if nothing is."""
        known = BITS if self.levels else KERNELS
        if self.bits not in known:
            return f"{self.name}: there are kernels for {either(known)} bits, not for {self.bits}"
        if self.group not in (*GROUPS, *((None,) if self.levels else ())):
            return f"group_size: wants {either(GROUPS)}, got {self.group}"
        return ""

    def misfit(self, size: int) -> str:
        """Why heads of this size cannot be coded so; empty if they can."""
        if size % (group := self.group or 8):
            return f"do not divide into groups of {group}"
        if self.rotation == "hadamard" and not hadamard_takes(size):
            return "have no Hadamard matrix (1, 12, 20 or 28 times a power of two)"
        return ""

    def vector_bytes(self, size: int, item_bytes: int) -> float:
        """Bytes of one stored vector; a scale (and a bias, of affine codes) takes `item_bytes`."""
        scales = size // (self.group or size) * (1 if self.levels else 2)
        return 4.0 * row_words(self.bits, size, scales, item_bytes)

    def codec(self, size: int, dtype: mx.Dtype) -> Codec:
        """For vectors of `size` numbers of that type."""
        made = Levels if self.levels else Grid
        inner: Codec = made(self.bits, self.group or size, size, dtype)
        return Turned(inner, self.rotation, size) if self.rotation else inner


def either(numbers: Sequence[int]) -> str:
    """`2, 3 or 4`."""
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
