"""Families of mlx-lm whose code takes one position or one mask for all rows: what runs in front of it.

These subclasses ask each layer's cache for its mask, take the position by row, or give a mask the
shape of the scores; the arithmetic is the model's own. Classes are replaced as in `mixers`: same
names, same module tree, same weights.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from stages.models.loading.split import SplitModel

POSITIONS = "wpe"  # mlx-lm's name of a learned table of them
LLAMA4, GEMMA2 = "mlx_lm.models.llama4", "mlx_lm.models.gemma2"


class _ChunkedTrunk:
    """In front of llama4's `LlamaModel`, for caches that make masks."""

    def __call__(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not hasattr(cache[0], "make_mask"):
            return super().__call__(inputs, cache)  # type: ignore[misc]
        h = self.embed_tokens(inputs)
        for layer, own in zip(self.layers, cache, strict=True):
            h = layer(h, own.make_mask(h.shape[1]), cache=own)
        return self.norm(h)


class _GrowingAttention:
    """In front of llama4's `Attention` without rotary positions: its queries grow with theirs."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offset = getattr(cache, "offset", 0)
        if not isinstance(offset, mx.array):
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        B, W, _ = x.shape
        q, k, v = (
            linear(x).reshape(B, W, heads, -1).transpose(0, 2, 1, 3)
            for linear, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        if self.attn_temperature_tuning:
            position_BW = offset[:, None] + mx.arange(1, W + 1)
            grown = mx.log(mx.floor(position_BW / self.floor_scale) + 1.0) * self.attn_scale + 1.0
            q = (q * grown[:, None, :, None]).astype(q.dtype)
        attend = sys.modules[LLAMA4].scaled_dot_product_attention
        k, v = cache.update_and_fetch(k, v)
        out = attend(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, W, -1))


class _GroupedMask:
    """In front of gemma2's `Attention`, whose scores are (B, heads, repeats, W, T)."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(mask, mx.array) and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        return super().__call__(x, mask, cache)  # type: ignore[misc]


class _LearnedPositions:
    """In front of a table of positions (gpt2, gpt_bigcode): padding behind the last one reads the last
    one. MLX does not check what it looks up."""

    def __call__(self: Any, positions: mx.array) -> mx.array:
        last = self.weight.shape[0] - 1
        return super().__call__(mx.minimum(positions, last))  # type: ignore[misc]


def make_ragged(split: SplitModel) -> None:
    """Let these families take rows of unequal length; others are left alone."""
    module = type(split.trunk).__module__
    if module == LLAMA4:
        _put_in_front(_ChunkedTrunk, split.trunk)
        for layer in split.trunk.layers:
            if not layer.self_attn.use_rope:
                _put_in_front(_GrowingAttention, layer.self_attn)
    if hasattr(split.trunk, POSITIONS):
        _put_in_front(_LearnedPositions, getattr(split.trunk, POSITIONS))
    if module == GEMMA2:
        for layer in split.trunk.layers:
            _put_in_front(_GroupedMask, layer.self_attn)


def _put_in_front(front: type, module: nn.Module) -> None:
    own = type(module)
    merged = type(own.__name__, (front, own), {"__module__": own.__module__})
    object.__setattr__(module, "__class__", merged)
