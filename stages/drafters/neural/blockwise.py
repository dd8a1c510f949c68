"""Drafting a block at once: the pending token and mask tokens through a few layers that see the
target's states of everything before as keys and values (DFlash, DSpark).

The drafter's cache holds keys and values of those states only; a block's own are forgotten again.
Row j of an unshifted block (z-lab) is for the token at its own position, so row 0 is of no use; row
j of a shifted one (DeepSpec) for the token after it. A block is always run whole, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.errors import OpenError
from pipeline.types import Proposal, Target
from stages.drafters.neural.block import (
    Block,
    BlockShape,
    block_shapes,
    gemma_norms,
    head_norms,
    rope,
    soft_capped,
)
from stages.drafters.neural.checkpoint import (
    Checkpoint,
    dtype_of,
    evaluated,
    fit,
    without_copies,
)
from stages.drafters.neural.markov import Markov, markov_shapes
from stages.drafters.neural.rows import (
    Row,
    SeenRows,
    best_chance,
    drawn,
    greedy,
    padded,
    proposal,
)


@dataclass(frozen=True)
class BlockPlan:
    """What a checkpoint's configuration says beyond its tensors."""

    taps: tuple[int, ...]
    block: int
    mask_id: int
    shifted: bool
    layers: int
    views: tuple[tuple[bool, int], ...]  # of each layer: causal within the block?, window (0: none)


class BlockModel:
    """The layers, what goes in and what comes out."""

    def __init__(self, found: Checkpoint, plan: BlockPlan, target: Target):
        checkpoint = replace(
            found, tensors={k.removeprefix("model."): v for k, v in found.tensors.items()}
        )
        self.plan, self._target, self.config = plan, target, found.config
        self.gemma = "layers.0.pre_feedforward_layernorm.weight" in checkpoint
        _check(checkpoint, plan, target)
        expected = _expected(checkpoint, plan, self.gemma) | markov_shapes(checkpoint)
        optional = {"embed_tokens.weight", "lm_head.weight"}
        taken = checkpoint.take(expected, optional, dtype=dtype_of(target))
        self.scale = float(target.hidden_size) ** 0.5 if self.gemma else 1.0
        self.tensors = evaluated(without_copies(taken, target, self.scale))
        self.eps = float(checkpoint.value("rms_norm_eps", default=1e-6))
        self.markov = Markov.of(self.tensors)
        size = checkpoint.shape("layers.0.self_attn.q_norm.weight")[0]
        turn = rope(size, checkpoint.config, "full_attention" if self.gemma else "")
        shape = BlockShape(size, self.eps, turn, self.gemma)
        prefixes = [f"layers.{i}." for i in range(plan.layers)]
        self.blocks = [Block(self.tensors, prefix, shape) for prefix in prefixes]
        key = self.tensors["layers.0.self_attn.k_proj.weight"]
        self.bytes_per_token = 2.0 * plan.layers * key.shape[0] * key.itemsize
        self.taps = plan.taps

    def norm(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def remember(self, shown_BWF: mx.array, caches: Seq[Any]) -> None:
        """Keys and values of what the target showed, into the caches."""
        context = self.norm(shown_BWF @ self.tensors["fc.weight"].T, "hidden_norm")
        for block, cache in zip(self.blocks, caches, strict=True):
            cache.update_and_fetch(*block.keys_values(context, cache.offset))

    def run(self, tokens_BW: mx.array, caches: Seq[Any], held: Seq[int]) -> mx.array:
        """Normed states (B, W, H) of a block that follows `held` tokens of each row."""
        x = self.embed(tokens_BW)
        for block, cache, view in zip(self.blocks, caches, self.plan.views, strict=True):
            normed, offset = block.norm(x, "input_layernorm"), cache.offset
            q = block.queries(normed, offset)
            k, v = cache.update_and_fetch(*block.keys_values(normed, offset))
            mask = _mask(held, tokens_BW.shape[1], k.shape[2], *view)
            x = block.finish(x, block.attend(q, k, v, mask))
        return self.norm(x, "norm")

    def embed(self, tokens_BW: mx.array) -> mx.array:
        if (table := self.tensors.get("embed_tokens.weight")) is not None:
            return table[tokens_BW] * self.scale
        embedded: mx.array = self._target.embed(tokens_BW)
        return embedded

    def scores(self, states_BWH: mx.array) -> mx.array:
        """(B, W, V), without a Markov head's share."""
        if (head := self.tensors.get("lm_head.weight")) is None:
            scores: mx.array = self._target.head(states_BWH)
            return scores
        scores = states_BWH @ head.T
        return soft_capped(scores, self.config) if self.gemma else scores


def _check(checkpoint: Checkpoint, plan: BlockPlan, target: Target) -> None:
    """A drafter for another target says so by its numbers."""
    theirs, taps = target.hidden_size, plan.taps
    facts = {
        "inputs of fc (taps x hidden size)": (
            checkpoint.shape("fc.weight")[1],
            len(taps) * theirs,
        ),
        "hidden size": (checkpoint.shape("fc.weight")[0], theirs),
        "vocabulary": (checkpoint.value("vocab_size"), target.vocab_size),
        "layers": (checkpoint.value("num_target_layers"), target.layer_count),
    }
    fit(checkpoint.folder, target, facts)
    beyond = [tap for tap in taps if tap >= target.layer_count]
    if beyond:
        raise OpenError(f"{checkpoint.folder} taps layers {beyond}; {target.name} ends before.")
    if not 0 <= plan.mask_id < target.vocab_size or plan.block < 2:
        raise OpenError(
            f"{checkpoint.folder}: mask token {plan.mask_id} of {target.vocab_size}, block of "
            f"{plan.block} (wants >= 2)."
        )


def _expected(checkpoint: Checkpoint, plan: BlockPlan, gemma: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor and its shape; heads and widths are those of layer 0."""
    hidden, seen = checkpoint.shape("fc.weight")
    size = checkpoint.shape("layers.0.self_attn.q_norm.weight")[0]
    heads = checkpoint.shape("layers.0.self_attn.q_proj.weight")[0] // size
    kv = checkpoint.shape("layers.0.self_attn.k_proj.weight")[0] // size
    inner = checkpoint.shape("layers.0.mlp.gate_proj.weight")[0]
    vocab = checkpoint.number("vocab_size")
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, seen),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    for prefix in (f"layers.{i}." for i in range(plan.layers)):
        expected |= block_shapes(prefix, hidden, inner, size, heads, kv)
        expected |= head_norms(prefix, size) | (gemma_norms(prefix, hidden) if gemma else {})
        if "layers.0.self_attn.v_proj.weight" not in checkpoint:
            del expected[f"{prefix}self_attn.v_proj.weight"]
    return expected


def _mask(held: Seq[int], width: int, slots: int, causal: bool, window: int) -> mx.array:
    """True (B, 1, W, T): all that is held and the block itself, or within a window and causal."""
    first = np.array(held)[:, None, None]
    slot = np.arange(slots)[None, None]
    query = first + np.arange(width)[None, :, None]
    seen = slot < first + width
    if causal:
        seen = seen & (slot <= query)
    if window:
        seen = seen & (slot > query - window) & (slot < query + window)
    return mx.array(np.broadcast_to(seen, (len(held), width, slots))[:, None])


class BlockRows(SeenRows):
    """`DraftRows` of one block model. `threshold`: a draft that the confidence head holds for less
    likely to be accepted, and all after it, are not proposed."""

    schema = "block:1"

    def __init__(self, model: BlockModel, namespace: str, max_width: int, threshold: float = 0.0):
        width = max(max_width, model.plan.block)
        super().__init__(model.plan.layers, namespace, width)
        self.model, self.threshold = model, threshold

    def wait(self, row: Row, tokens: Seq[int], shown_WF: mx.array) -> None:
        row.tokens, row.shown = [*row.tokens, *tokens], [*row.shown, shown_WF]

    def run(self, tokens: Seq[Seq[int]], shown: Seq[Seq[mx.array]]) -> mx.array:
        widths = [len(ids) for ids in tokens]
        round = self.cache.begin([[0] * width for width in widths])
        shown_BWF = padded(shown, max(widths))
        self.model.remember(shown_BWF, round.caches)
        round.launch()
        round.resolve(widths)
        return shown_BWF

    def block(self, pending: Seq[int]) -> mx.array:
        """Normed states (B, block, H) of one block after what the rows hold."""
        plan, held = self.model.plan, list(self.cache.lengths)
        ids_BW = np.full((self.size, plan.block), plan.mask_id, np.int32)
        ids_BW[:, 0] = pending
        round = self.cache.begin(ids_BW.tolist())
        states = self.model.run(round.tokens_BW, round.caches, held)
        round.launch(states)
        round.resolve([0] * self.size)
        return states if plan.shifted else states[:, 1:]

    def propose(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        self.flush()
        most = self.model.plan.block - (not self.model.plan.shifted)
        widths = [
            min(depth, most) if row.last is not None else 0
            for row, depth in zip(self.rows, depths, strict=True)
        ]
        if not any(widths):
            return [[] for _ in depths]
        states = self.block(pending)[:, : max(widths)]
        fill = _Fill(self.model, samplers, [row.length + 1 for row in self.rows])
        ids_BW, sure_BW = fill(mx.array(list(pending), mx.int32), states)
        return [self._proposal(row, n, ids_BW, sure_BW, fill) for row, n in enumerate(widths)]

    def _proposal(
        self, row: int, width: int, ids_BW: np.ndarray, sure_BW: np.ndarray, fill: _Fill
    ) -> Proposal:
        sure = sure_BW[row, :width].tolist()
        unsure = [at for at, chance in enumerate(sure) if chance < self.threshold]
        width = unsure[0] if unsure else width
        return proposal(ids_BW[row], sure_BW[row], width, [at[row] for at in fill.sources])


class _Fill:
    """The tokens of a block, one after the other where a Markov head links them."""

    def __init__(self, model: BlockModel, samplers: Seq[Any], positions: Seq[int]):
        self.model, self.samplers, self.positions = model, samplers, positions
        self.sources: list[list[np.ndarray | None]] = []

    def __call__(self, previous_B: mx.array, states_BWH: mx.array) -> tuple[Any, Any]:
        """(ids, confidences), (B, W) each, on the host."""
        scores_BWV, markov = self.model.scores(states_BWH), self.model.markov
        ids, sure, memory = [], [], None
        for at in range(states_BWH.shape[1]):
            scores_BV, state_BH = scores_BWV[:, at], states_BWH[:, at]
            if markov is not None:
                bias, memory = markov.bias(previous_B, state_BH, memory)
                scores_BV = scores_BV + bias
            chance = markov.confidence(previous_B, state_BH) if markov is not None else None
            previous_B = self._pick(scores_BV, at)
            ids.append(previous_B)
            sure.append(best_chance(scores_BV) if chance is None else chance)
        return np.asarray(mx.stack(ids, 1)), np.asarray(mx.stack(sure, 1).astype(mx.float32))

    def _pick(self, scores_BV: mx.array, at: int) -> mx.array:
        if greedy(self.samplers):
            self.sources.append([None] * len(self.positions))
            return mx.argmax(scores_BV, axis=-1).astype(mx.int32)
        positions = [position + at for position in self.positions]
        ids, sources = drawn(scores_BV, self.samplers, positions, at, lambda scores_V: scores_V)
        self.sources.append(sources)
        return mx.array(ids, mx.int32)
