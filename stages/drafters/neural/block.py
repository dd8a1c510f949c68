"""One transformer block as the published drafters have it: Llama, Qwen 3 and Gemma 4 in one form.

Which form it is shows in the tensors: q_norm and k_norm, sandwich norms, a layer scalar, no v_proj
(values are the keys' raw projection). Legend: B rows, W width, T keys, D model, H heads, K KV heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Tensors = Mapping[str, mx.array]
Rope = Callable[..., mx.array]
GEMMA_CAP = 30.0


@dataclass(frozen=True)
class BlockShape:
    """What the tensors do not say."""

    head_dim: int
    eps: float
    rope: Rope
    gemma: bool = False  # scale 1, values normed without a weight, tanh-gelu


class Block:
    """`tensors` under `prefix`. The caller decides what keys and queries are made from."""

    def __init__(self, tensors: Tensors, prefix: str, shape: BlockShape):
        self.w = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        self.shape = shape
        self.scale = 1.0 if shape.gemma else shape.head_dim**-0.5
        self.sandwich = "pre_feedforward_layernorm.weight" in self.w

    def norm(self, x_BWD: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x_BWD, self.w[f"{name}.weight"], self.shape.eps)

    def queries(self, x_BWD: mx.array, offset: Any) -> mx.array:
        """(B, H, W, d), normed and rotated from position `offset` (int, or one a row)."""
        return self._rotated(self._heads(x_BWD, "q_proj"), "q_norm", offset)

    def keys_values(self, x_BWD: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """(B, K, W, d) each, keys normed and rotated."""
        raw = self._heads(x_BWD, "k_proj")
        own = "self_attn.v_proj.weight" in self.w
        values = self._heads(x_BWD, "v_proj") if own else raw
        if self.shape.gemma:
            values = mx.fast.rms_norm(values, None, self.shape.eps)
        return self._rotated(raw, "k_norm", offset), values.swapaxes(1, 2)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: Any) -> mx.array:
        """(B, W, H * d). `mask`: None, "causal", or True where a query may look."""
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=mask)
        return out.swapaxes(1, 2).reshape(out.shape[0], out.shape[2], -1)

    def finish(self, residual_BWD: mx.array, attended: mx.array) -> mx.array:
        """Output projection, residual, MLP, residual."""
        out = attended @ self.w["self_attn.o_proj.weight"].T
        if self.sandwich:
            y = residual_BWD + self.norm(out, "post_attention_layernorm")
            inner = self._mlp(self.norm(y, "pre_feedforward_layernorm"))
            y = y + self.norm(inner, "post_feedforward_layernorm")
        else:
            y = residual_BWD + out
            y = y + self._mlp(self.norm(y, "post_attention_layernorm"))
        return y * self.w["layer_scalar"] if "layer_scalar" in self.w else y

    def _heads(self, x_BWD: mx.array, name: str) -> mx.array:
        flat = x_BWD @ self.w[f"self_attn.{name}.weight"].T
        return flat.reshape(*flat.shape[:2], -1, self.shape.head_dim)

    def _rotated(self, x_BWHd: mx.array, norm: str, offset: Any) -> mx.array:
        if (weight := self.w.get(f"self_attn.{norm}.weight")) is not None:
            x_BWHd = mx.fast.rms_norm(x_BWHd, weight, self.shape.eps)
        return self.shape.rope(x_BWHd.swapaxes(1, 2), offset=offset)

    def _mlp(self, x: mx.array) -> mx.array:
        gate = x @ self.w["mlp.gate_proj.weight"].T
        active = nn.gelu_approx(gate) if self.shape.gemma else nn.silu(gate)
        return (active * (x @ self.w["mlp.up_proj.weight"].T)) @ self.w["mlp.down_proj.weight"].T


def block_shapes(
    prefix: str, hidden: int, inner: int, head_dim: int, heads: int, kv: int, wide: int = 1
) -> dict[str, tuple[int, ...]]:
    """The plain block's tensors; q, k and v read `wide` hidden states side by side."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head_dim, wide * hidden),
        "self_attn.k_proj.weight": (kv * head_dim, wide * hidden),
        "self_attn.v_proj.weight": (kv * head_dim, wide * hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def head_norms(prefix: str, head_dim: int) -> dict[str, tuple[int, ...]]:
    """What Qwen 3 and Gemma 4 add."""
    return {f"{prefix}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}


def gemma_norms(prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """What Gemma 4 adds beyond that."""
    names = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
    shapes: dict[str, tuple[int, ...]] = {prefix + name: (hidden,) for name in names}
    return shapes | {f"{prefix}layer_scalar": (1,)}


def soft_capped(scores: mx.array, config: Mapping[str, Any]) -> mx.array:
    """Gemma's scores of a drafter's own head; null in the configuration switches the cap off."""
    cap = config.get("final_logit_softcapping", GEMMA_CAP)
    return mx.tanh(scores / cap) * cap if cap else scores


def rope(head_dim: int, config: Mapping[str, Any], layer_type: str = "") -> Rope:
    """The rotary embedding a configuration asks for: `rope_theta` at the top, or in
    `rope_parameters` (by layer type, for Gemma), or in `rope_scaling`."""
    from mlx_lm.models.rope_utils import initialize_rope

    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings = dict(settings.get(layer_type, settings))
    theta = config.get("rope_theta") or settings.get("rope_theta") or 10000.0
    made: Rope = initialize_rope(
        head_dim,
        base=theta if not layer_type else settings.get("rope_theta", theta),
        traditional=False,
        scaling_config=settings or None,
        max_position_embeddings=config.get("max_position_embeddings"),
    )
    return made
