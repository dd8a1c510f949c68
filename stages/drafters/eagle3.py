"""EAGLE-3 heads (arXiv 2503.01840) in the three dialects they are published in.

One transformer layer that reads the target's states at a few layers, fused into one, beside the
embedding of the next token. SafeAILab's (and SpecForge's) files name the layer `midlayer` and, where
they name taps, mean layer outputs; speculators' files mean "before layer i"; DeepSpec's mean outputs
and carry q_norm and k_norm, for Gemma 4 also its norms, scaled embedding and soft cap. Facts:
layouts and forwards of the published implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.errors import OpenError
from pipeline.types import EMBEDDING, DraftRows, Target
from stages.drafters.neural.block import (
    Block,
    BlockShape,
    block_shapes,
    gemma_norms,
    head_norms,
    rope,
    soft_capped,
)
from stages.drafters.neural.chain import ChainRows
from stages.drafters.neural.checkpoint import (
    Checkpoint,
    Tensors,
    dtype_of,
    evaluated,
    fit,
    read,
    without_copies,
)
from stages.drafters.neural.drafter import NeuralDrafter

IGNORED = r"t2d|verifier_.*|rotary_emb\..*"


class Eagle3(NeuralDrafter["EagleModel"]):
    """`path`: the head's folder."""

    family = "eagle3"

    def __init__(self, target: Target, *, path: str):
        super().__init__(target, path)

    def load(self) -> tuple[EagleModel, str]:
        found = read(self.folder)
        dialect = Dialect.of(found, self._target)
        return EagleModel(found, dialect, self._target), found.identity()

    def rows_of(self, model: EagleModel, max_width: int) -> DraftRows:
        return ChainRows(model, self.namespace, max_width)


@dataclass(frozen=True)
class Dialect:
    """How a file says what it is. `settings` describe the layer."""

    name: str  # safeai | speculators | deepspec
    prefix: str
    taps: tuple[int, ...]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: Target) -> Dialect:
        config = checkpoint.config
        layer = config.get("transformer_layer_config")
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in checkpoint else "layers.0."
        if layer is not None or config.get("speculators_model_type"):
            before = config.get("eagle_aux_hidden_state_layer_ids") or _defaults(
                target.layer_count, 1
            )
            taps = tuple(EMBEDDING if i == 0 else i - 1 for i in before)
            return cls("speculators", prefix, taps, {**config, **(layer or {})})
        if (ids := config.get("target_layer_ids")) is not None:
            taps = tuple(EMBEDDING if i == -1 else i for i in ids)
            return cls("deepspec", prefix, taps, config)
        nested = config.get("eagle_config") or {}
        taps = tuple(
            nested.get("eagle_aux_hidden_state_layer_ids") or _defaults(target.layer_count, 0)
        )
        return cls("safeai", prefix, taps, config)


def _defaults(layers: int, before: int) -> tuple[int, ...]:
    """Outputs of layers 1, N/2 - 1 and N - 4 (`before`: 1 to count from the layer that follows)."""
    return tuple(i + before for i in (1, layers // 2 - 1, layers - 4))


class EagleModel:
    """The head as a chain model; its state between steps is the layer's output, un-normed."""

    layers = 1

    def __init__(self, checkpoint: Checkpoint, dialect: Dialect, target: Target):
        self._target, self._dialect, self.taps = target, dialect, dialect.taps
        config = dialect.settings
        self.gemma = f"{dialect.prefix}pre_feedforward_layernorm.weight" in checkpoint
        self.scale = float(config["hidden_size"]) ** 0.5 if self.gemma else 1.0
        expected = self._expected(checkpoint)
        self._check(checkpoint, target)
        optional = {"embed_tokens.weight", "d2t", "lm_head.bias"}
        taken = checkpoint.take(expected, optional, IGNORED, dtype_of(target))
        self.tensors: Tensors = evaluated(without_copies(taken, target, self.scale))
        head_dim = self._head_dim(checkpoint)
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        turn = rope(head_dim, config, "full_attention" if self.gemma else "")
        shape = BlockShape(head_dim, self.eps, turn, self.gemma)
        self.block = Block(self.tensors, dialect.prefix, shape)
        self.residual_normed = bool(config.get("norm_before_residual", False))
        k_proj = self.tensors[f"{dialect.prefix}self_attn.k_proj.weight"]
        self.bytes_per_token = 2.0 * k_proj.shape[0] * k_proj.itemsize

    def _head_dim(self, checkpoint: Checkpoint) -> int:
        name = f"{self._dialect.prefix}self_attn.q_norm.weight"
        if name in checkpoint:
            return checkpoint.shape(name)[0]
        config = self._dialect.settings
        heads = int(config["num_attention_heads"])
        return int(config.get("head_dim") or int(config["hidden_size"]) // heads)

    def _expected(self, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
        """Every tensor and its shape, from the configuration's numbers."""
        config, prefix = self._dialect.settings, self._dialect.prefix
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        heads = int(config["num_attention_heads"])
        head_dim, vocab = self._head_dim(checkpoint), int(config["vocab_size"])
        kv = int(config.get("num_key_value_heads") or heads)
        if self.gemma:  # full layers have fewer, and say so in their tensors
            kv = checkpoint.shape(f"{prefix}self_attn.k_proj.weight")[0] // head_dim
        own = int(config.get("draft_vocab_size") or config.get("truncated_vocab_size") or vocab)
        theirs = int(config.get("target_hidden_size") or self._target.hidden_size)
        seen = len(self._dialect.taps) * theirs
        expected = block_shapes(prefix, hidden, inner, head_dim, heads, kv, wide=2)
        expected |= {
            f"{prefix}hidden_norm.weight": (hidden,),
            "fc.weight": (hidden, seen),
            "norm.weight": (hidden,),
            "lm_head.weight": (own, hidden),
            "embed_tokens.weight": (vocab, hidden),
        }
        expected |= {"d2t": (own,)} if own != vocab or "d2t" in checkpoint else {}
        if f"{prefix}self_attn.q_norm.weight" in checkpoint:
            expected |= head_norms(prefix, head_dim)
        if self.gemma:
            expected |= gemma_norms(prefix, hidden)
            if f"{prefix}self_attn.v_proj.weight" not in checkpoint:
                del expected[f"{prefix}self_attn.v_proj.weight"]
        for name in ("input_norm", "fc_norm"):
            if f"{name}.weight" in checkpoint:
                expected[f"{name}.weight"] = (seen,) if name == "input_norm" else (hidden,)
        return expected

    def _check(self, checkpoint: Checkpoint, target: Target) -> None:
        """A head for another target says so by its numbers."""
        config, theirs = self._dialect.settings, target.hidden_size
        own_embedding = "embed_tokens.weight" in checkpoint
        seen = len(self._dialect.taps)
        facts = {
            "inputs of fc (taps x hidden size)": (checkpoint.shape("fc.weight")[1], seen * theirs),
            "vocabulary": (config.get("vocab_size"), target.vocab_size),
            "hidden size": (None if own_embedding else config.get("hidden_size"), theirs),
            "layers": (config.get("num_target_layers"), target.layer_count),
        }
        fit(checkpoint.folder, target, facts)
        if bad := [tap for tap in self._dialect.taps if not EMBEDDING <= tap < target.layer_count]:
            raise OpenError(
                f"{checkpoint.folder} taps layers {bad}; {target.name} has 0..{target.layer_count - 1}."
            )

    # --- the chain

    def enter(self, shown_BWF: mx.array) -> mx.array:
        if (norm := self.tensors.get("input_norm.weight")) is not None:
            shown_BWF = mx.fast.rms_norm(shown_BWF, norm, self.eps)
        fused = shown_BWF @ self.tensors["fc.weight"].T
        if (norm := self.tensors.get("fc_norm.weight")) is not None:
            fused = mx.fast.rms_norm(fused, norm, self.eps)
        return fused

    def embed(self, tokens_BW: mx.array) -> mx.array:
        table = self.tensors.get("embed_tokens.weight")
        if table is None:
            embedded: mx.array = self._target.embed(tokens_BW)
            return embedded
        return table[tokens_BW] * self.scale

    def forward(self, tokens_BW: mx.array, state_BWH: mx.array, caches: Sequence[Any]) -> mx.array:
        block, (cache,) = self.block, caches
        normed = block.norm(state_BWH, "hidden_norm")
        both = [block.norm(self.embed(tokens_BW), "input_layernorm"), normed]
        x, offset = mx.concatenate(both, -1), cache.offset
        mask = cache.make_mask(tokens_BW.shape[1])
        q, (k, v) = block.queries(x, offset), block.keys_values(x, offset)
        k, v = cache.update_and_fetch(k, v)
        attended = block.attend(q, k, v, mask)
        return block.finish(normed if self.residual_normed else state_BWH, attended)

    def scores(self, state_BWH: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(state_BWH, self.tensors["norm.weight"], self.eps)
        if (head := self.tensors.get("lm_head.weight")) is not None:
            scores = normed @ head.T
            return soft_capped(scores, self._dialect.settings) if self.gemma else scores
        theirs: mx.array = self._target.head(normed)
        return theirs

    def to_target(self, ids: mx.array) -> mx.array:
        offsets = self.tensors.get("d2t")
        return (ids if offsets is None else ids + offsets[ids]).astype(mx.int32)

    def spread(self, scores_Vd: np.ndarray) -> np.ndarray:
        if "d2t" not in self.tensors:
            return scores_Vd
        wide = np.full(self._target.vocab_size, -np.inf, np.float32)
        wide[np.asarray(self.to_target(mx.arange(len(scores_Vd))))] = scores_Vd
        return wide
