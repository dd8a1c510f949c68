"""Rows of one attention layer, full or sliding, whose keys and values are stored as affine codes.

A token is coded when it arrives and never again: rollback moves lengths, and slicing, joining and
saving move codes. Attention works on the codes (`Grid`), except in wide chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from pipeline.types import LayerSpec
from stages.rows.attention import AttentionLayout, Buffers
from stages.rows.grid import NARROW, Grid, Packed


class Fetched(tuple[mx.array, ...]):
    """Coded keys that know how they are attended, for layers that take them from another layer."""

    attend: Callable[..., mx.array]

    def __new__(cls, packed: Packed, attend: Callable[..., mx.array]) -> Fetched:
        fetched = super().__new__(cls, packed)
        fetched.attend = attend
        return fetched


class QuantizedLayout(AttentionLayout):
    """`AttentionLayout` over codes. The target must ask `attend` (see `Target.can`)."""

    names = ("keys.q", "keys.s", "keys.b", "values.q", "values.s", "values.b")

    def __init__(self, spec: LayerSpec, max_width: int, keys: Grid, values: Grid):
        super().__init__(spec, max_width)
        self.keys, self.values = keys, values

    def encode(self, keys: mx.array, values: mx.array) -> Buffers:
        return (*self.keys.pack(keys), *self.values.pack(values))

    def fetched(self, stored: Buffers) -> tuple[Fetched, Packed]:
        return Fetched(stored[:3], self.attend), stored[3:]

    def spelled(self, stored: Buffers) -> tuple[mx.array, mx.array]:
        return self.keys.spell_out(stored[:3]), self.values.spell_out(stored[3:])

    def attend(
        self,
        plain: Callable[..., mx.array],
        queries: mx.array,
        keys: Packed,
        values: Packed,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """What mlx-lm's `scaled_dot_product_attention` gives for the spelled-out keys and values:
        (B, Hq, W, D). `sinks` (Hq,) are scores of a key that has no value. `plain` is that function,
        for chunks so wide (as in cpu_math) that spelling the vectors out hardly shows."""
        B, Hq, W, _ = queries.shape
        if W > NARROW:
            return plain(queries, self.keys.spell_out(keys), self.values.spell_out(values))
        H, T = keys[0].shape[1:3]
        asked = (queries * scale).reshape(B, H, Hq // H * W, -1)
        scores = self.keys.dots(asked, keys).reshape(B, H, -1, W, T)
        if mask is not None:
            scores = scores + _added(mask, W, T, scores.dtype)
        weights = _softmax(scores, sinks).reshape(B, H, -1, T)
        return self.values.mix(weights, values).reshape(B, Hq, W, -1)


def _added(mask: mx.array | str, width: int, keys: int, dtype: mx.Dtype) -> mx.array:
    """The mask as a term of scores (B, H, Hq / H, W, T). A broadcast sum took a fifth of the time
    of a broadcast `mx.where` on a CPU."""
    if isinstance(mask, str):
        assert mask == "causal", mask
        mask = mx.arange(keys) <= mx.arange(keys - width, keys)[:, None]
    if mask.dtype == mx.bool_:
        mask = mx.where(mask, mx.array(0, dtype), mx.array(mx.finfo(dtype).min, dtype))
    return mask[:, :, None] if mask.ndim == 4 else mask


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    shape = (*scores.shape[:-1], 1)
    last = mx.broadcast_to(sinks.reshape(1, *scores.shape[1:3], 1, 1), shape).astype(scores.dtype)
    joined = mx.concatenate([scores, last], axis=-1)
    return mx.softmax(joined, axis=-1, precise=True)[..., :-1]
