"""Rows of one attention layer, full or sliding, whose keys and values are stored as codes.

A token is coded when it arrives and never again: rollback moves lengths, and slicing, joining and
saving move codes. Attention is that of the model on the vectors that the codes stand for, spelled out
for the time of one layer, whatever the width of the pass: so it rounds as native attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

from pipeline.types import LayerSpec
from stages.rows.attention import AttentionLayout, Buffers
from stages.rows.codes import Codec

Attend: TypeAlias = "Callable[..., mx.array]"


class Fetched(tuple[Any, ...]):
    """Keys that know how they are attended, for layers that take them from another layer."""

    attend: Attend

    def __new__(cls, arrays: Buffers, attend: Attend) -> Fetched:
        fetched = super().__new__(cls, arrays)
        fetched.attend = attend
        return fetched


class QuantizedLayout(AttentionLayout):
    """`AttentionLayout` over codes. Where these are of turned vectors the target must ask `attend`
    (see `Target.can`)."""

    names = ("key_codes", "value_codes")

    def __init__(self, spec: LayerSpec, max_width: int, keys: Codec, values: Codec):
        super().__init__(spec, max_width)
        self.keys, self.values = keys, values
        self.turns = keys.turns or values.turns

    def encode(self, keys: mx.array, values: mx.array) -> Buffers:
        return self.keys.pack(keys), self.values.pack(values)

    def fetched(self, stored: Buffers) -> tuple[Any, Any]:
        keys, values = self.keys.spell_out(stored[0]), self.values.spell_out(stored[1])
        return (Fetched((keys,), self._turned), values) if self.turns else (keys, values)

    def spelled(self, stored: Buffers) -> tuple[mx.array, mx.array]:
        keys, values = self.keys.spell_out(stored[0]), self.values.spell_out(stored[1])
        return self.keys.unturn(keys), self.values.unturn(values)

    def _turned(
        self, plain: Attend, queries: mx.array, keys: Fetched, values: mx.array, **_: Any
    ) -> mx.array:
        """(B, Hq, W, D), by `plain` attention with the model's own scale and mask. A rotation changes
        no dot product, so queries are turned, not keys back; and attention is linear in the values, so
        what they are mixed to is turned back."""
        return self.values.unturn(plain(self.keys.turn(queries), keys[0], values))
