"""One more decoder layer of the target's own kind, trained to guess the token after next.

Qwen's MTP heads and DeepSeek's and GLM's nextn layers are the same machine under other names: the
embedding of token i+1 and the target's state at token i (after the last norm), each normed, side by
side through one matrix, then an ordinary layer of the family (mlx-lm's code) with its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from pipeline.types import AFTER_NORM, Target
from stages.drafters.neural.checkpoint import Checkpoint, Tensors, evaluated

Shape = tuple[int, ...]
CACHED = ("k_proj", "v_proj", "kv_a_proj_with_mqa")  # whose outputs a layer keeps


@dataclass(frozen=True)
class Names:
    """Where a family keeps the parts around its layer; `layer` is the layer's own prefix."""

    join: str
    embedding_norm: str
    hidden_norm: str
    last_norm: str
    layer: str


class NextLayer:
    """A chain model; `raw` hands on the layer's output before the last norm instead of after."""

    layers = 1
    taps = (AFTER_NORM,)

    def __init__(
        self, target: Target, layer: Any, checkpoint: Checkpoint, names: Names, ignored: str = "",
        raw: bool = False, dtype: mx.Dtype = mx.float32,
    ):  # fmt: skip
        self._target, self._layer, self._names, self._raw = target, layer, names, raw
        self.eps = float(layer.input_layernorm.eps)
        hidden = target.hidden_size
        norms = (names.embedding_norm, names.hidden_norm, names.last_norm)
        expected: dict[str, Shape] = {names.join: (hidden, 2 * hidden)}
        expected |= dict.fromkeys(norms, (hidden,))
        own = tree_flatten(layer.parameters())
        expected |= {names.layer + name: tuple(array.shape) for name, array in own}
        self.tensors: Tensors = evaluated(checkpoint.take(expected, (), ignored, dtype))
        layer.load_weights([(name, self.tensors[names.layer + name]) for name, _ in own])

    @property
    def bytes_per_token(self) -> float:
        """Keys and values, or the one latent of both."""
        made = [self.tensors.get(f"{self._names.layer}self_attn.{name}.weight") for name in CACHED]
        return float(sum(w.shape[0] * w.itemsize for w in made if w is not None))

    def _norm(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self.tensors[name], self.eps)

    def enter(self, shown_BWF: mx.array) -> mx.array:
        return shown_BWF

    def forward(self, tokens_BW: mx.array, state_BWH: mx.array, caches: Sequence[Any]) -> mx.array:
        names, (cache,) = self._names, caches
        embedded = self._norm(self._target.embed(tokens_BW), names.embedding_norm)
        both = mx.concatenate([embedded, self._norm(state_BWH, names.hidden_norm)], -1)
        x = both @ self.tensors[names.join].T
        mask = cache.make_mask(tokens_BW.shape[1], return_array=True)
        out: mx.array = self._layer(x, mask, cache)
        return out if self._raw else self._norm(out, names.last_norm)

    def scores(self, state_BWH: mx.array) -> mx.array:
        normed = self._norm(state_BWH, self._names.last_norm) if self._raw else state_BWH
        scores: mx.array = self._target.head(normed)
        return scores

    def to_target(self, ids: mx.array) -> mx.array:
        return ids.astype(mx.int32)

    def spread(self, scores_Vd: np.ndarray) -> np.ndarray:
        return scores_Vd


def stacked_experts(tensors: Tensors, prefix: str) -> Tensors:
    """Experts in the three forms published, as mlx-lm's `switch_mlp` has them: one matrix an expert,
    or gate and up fused, or already stacked."""
    made = {k: v for k, v in tensors.items() if not k.startswith(f"{prefix}experts.")}
    for name in ("gate_proj", "up_proj", "down_proj"):
        single = [k for k in tensors if k.startswith(prefix) and k.endswith(f".{name}.weight")]
        count = sum(k.startswith(f"{prefix}experts.") for k in single)
        if count:
            parts = [tensors[f"{prefix}experts.{e}.{name}.weight"] for e in range(count)]
            made[f"{prefix}switch_mlp.{name}.weight"] = mx.stack(parts)
    if (fused := tensors.get(f"{prefix}experts.gate_up_proj")) is not None:
        gate, up = mx.split(fused, 2, axis=1)
        made[f"{prefix}switch_mlp.gate_proj.weight"] = gate
        made[f"{prefix}switch_mlp.up_proj.weight"] = up
        made[f"{prefix}switch_mlp.down_proj.weight"] = tensors[f"{prefix}experts.down_proj"]
    return made
