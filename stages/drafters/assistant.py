"""Gemma 4 assistants: four small layers that attend to the target's own keys and values.

They keep nothing but the target's last state. The three sliding layers read the target's last
sliding layer that owns keys, the full one its last full layer; those keys carry the target's own
positions, so here absolute positions count: every step stands at the pending token's. A sliding
layer sees the keys that the target's would see from there (the reference shows two more, which a
window need not hold any more).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.errors import OpenError
from pipeline.types import AFTER_NORM, DraftRows, Rows, Target
from stages.drafters.neural.block import (
    Block,
    BlockShape,
    block_shapes,
    gemma_norms,
    head_norms,
    rope,
)
from stages.drafters.neural.chain import Picks
from stages.drafters.neural.checkpoint import (
    Checkpoint,
    Tensors,
    dtype_of,
    evaluated,
    fit,
    read,
)
from stages.drafters.neural.drafter import NeuralDrafter
from stages.drafters.neural.rows import Row, SeenRows

Donated = Mapping[str, tuple[mx.array, mx.array, mx.array]]  # kind -> keys, values, mask
KINDS = {"sliding_attention": "sliding", "full_attention": "full"}
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


class Assistant(NeuralDrafter["AssistantModel"]):
    """`path`: the assistant's folder."""

    needs: Mapping[str, frozenset[str]] = {**NeuralDrafter.needs, "kv": frozenset({"donor"})}
    family = "assistant"

    def __init__(self, target: Target, *, path: str):
        super().__init__(target, path)
        self.donors: dict[str, int] = {}

    def load(self) -> tuple[AssistantModel, str]:
        found = read(self.folder)
        model = AssistantModel(found, self._target)
        self.donors = donors(found, self._target, model)
        return model, found.identity()

    def rows_of(self, model: AssistantModel, max_width: int) -> DraftRows:
        return AssistantRows(model, self.donors, self._target, self.namespace, max_width)


def donors(found: Checkpoint, target: Target, model: AssistantModel) -> dict[str, int]:
    """kind -> index of the layer that gives its keys: the last one of the kind that owns any."""
    last = {spec.kind: index for index, spec in enumerate(target.specs)}
    facts: dict[str, tuple[Any, Any]] = {}
    for kind in set(model.kinds):
        if kind not in last:
            raise OpenError(f"{found.folder} reads {kind} layers; {target.name} has none.")
        shape = re.match(r"\w+:(\d+)x(\d+)", target.specs[last[kind]].signature)
        assert shape is not None, target.specs[last[kind]].signature
        facts[f"head size of {kind} layers"] = (model.size(kind), int(shape[2]))
        heads = model.heads(kind)
        if heads % int(shape[1]):
            facts[f"{kind} heads, a multiple of KV heads"] = (heads, int(shape[1]))
    fit(found.folder, target, facts)
    return {kind: last[kind] for kind in set(model.kinds)}


class AssistantModel:
    """One step: from a token and a state of the target's size to normed states and the next such."""

    taps = (AFTER_NORM,)
    bytes_per_token = 0.0

    def __init__(self, found: Checkpoint, target: Target):
        text = {**found.config, **(found.config.get("text_config") or {})}
        self._target = target
        self.kinds = [KINDS[kind] for kind in text["layer_types"]]
        backbone = found.shape("post_projection.weight")[0]
        facts = {
            "backbone hidden size": (backbone, target.hidden_size),
            "vocabulary": (text["vocab_size"], target.vocab_size),
        }
        fit(found.folder, target, facts)
        expected = _expected(found, text, len(self.kinds))
        ignored = r"lm_head\.weight"
        self.tensors: Tensors = evaluated(found.take(expected, (), ignored, dtype_of(target)))
        self.eps = float(text.get("rms_norm_eps", 1e-6))
        self.top_k = int(found.value("centroid_intermediate_top_k", default=32))
        self.blocks = [self._block(i, kind, text) for i, kind in enumerate(text["layer_types"])]

    def _block(self, index: int, kind: str, text: Mapping[str, Any]) -> Block:
        prefix = f"model.layers.{index}."
        size = self.tensors[f"{prefix}self_attn.q_norm.weight"].shape[0]
        shape = BlockShape(size, self.eps, rope(size, text, kind), gemma=True)
        return Block(self.tensors, prefix, shape)

    def _of(self, kind: str) -> Block:
        return self.blocks[self.kinds.index(kind)]

    def size(self, kind: str) -> int:
        return self._of(kind).shape.head_dim

    def heads(self, kind: str) -> int:
        return int(self._of(kind).w["self_attn.q_proj.weight"].shape[0]) // self.size(kind)

    def step(
        self, embedded_B1D: mx.array, state_B1D: mx.array, donated: Donated, offset: Any
    ) -> mx.array:
        """Normed states (B, 1, H) at the positions `offset`."""
        both = mx.concatenate([embedded_B1D, state_B1D], axis=-1)
        x = both @ self.tensors["pre_projection.weight"].T
        for block, kind in zip(self.blocks, self.kinds, strict=True):
            keys, values, mask = donated[kind]
            q = block.queries(block.norm(x, "input_layernorm"), offset)
            x = block.finish(x, block.attend(q, keys, values, mask))
        return mx.fast.rms_norm(x, self.tensors["model.norm.weight"], self.eps)

    def back(self, normed_B1H: mx.array) -> mx.array:
        """What stands in for the target's state in the next step, (B, 1, D)."""
        return normed_B1H @ self.tensors["post_projection.weight"].T

    def scores(self, normed_B1H: mx.array) -> mx.array:
        """(B, 1, V). With centroids: of the tokens nearest to the best centroids; all others get one
        less than the least of those."""
        table = self.tensors["model.embed_tokens.weight"]
        if ORDER not in self.tensors:
            return normed_B1H @ table.T
        centroids = self.tensors[CENTROIDS]
        near = normed_B1H @ centroids.T
        best = mx.argpartition(-near, self.top_k - 1, axis=-1)[..., : self.top_k]
        groups = self.tensors[ORDER].reshape(centroids.shape[0], -1)
        ids = groups[best].reshape(*best.shape[:2], -1)  # (B, 1, C)
        known = (table[ids] @ normed_B1H[..., None])[..., 0]
        floor = known.min(-1, keepdims=True) - 1
        wide = mx.broadcast_to(floor, (*floor.shape[:-1], table.shape[0]))
        return mx.put_along_axis(wide, ids, known, axis=-1)

    def to_target(self, ids: mx.array) -> mx.array:
        return ids.astype(mx.int32)

    def spread(self, scores_V: np.ndarray) -> np.ndarray:
        return scores_V


def _expected(
    found: Checkpoint, text: Mapping[str, Any], layers: int
) -> dict[str, tuple[int, ...]]:
    """Every tensor and its shape; layers have no keys and values."""
    hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    backbone = found.shape("post_projection.weight")[0]
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * backbone),
        "post_projection.weight": (backbone, hidden),
    }
    if found.config.get("use_ordered_embeddings"):
        expected |= {CENTROIDS: (int(found.number("num_centroids")), hidden), ORDER: (vocab,)}
    for prefix in (f"model.layers.{i}." for i in range(layers)):
        size = found.shape(f"{prefix}self_attn.q_norm.weight")[0]
        heads = int(text["num_attention_heads"])
        plain = block_shapes(prefix, hidden, int(text["intermediate_size"]), size, heads, 1)
        plain |= head_norms(prefix, size) | gemma_norms(prefix, hidden)
        own = ("k_proj", "v_proj", "k_norm")
        expected |= {k: v for k, v in plain.items() if not any(name in k for name in own)}
    return expected


class AssistantRows(SeenRows):
    """`DraftRows` of one assistant: nothing waits, nothing is kept but the last state."""

    schema = "assistant:1"

    def __init__(
        self, model: AssistantModel, donors: Mapping[str, int], target: Target, namespace: str,
        max_width: int,
    ):  # fmt: skip
        super().__init__(0, namespace, max_width)
        self.model, self._donors, self._target = model, donors, target
        self._rows: Rows | None = None

    def watch(self, rows: Rows) -> None:
        """Asks for the keys once, so that a policy without any is refused at startup (`check` cannot
        know what `auto` will choose)."""
        for layer in self._donors.values():
            rows.donor(layer)
        self._rows = rows

    def wait(self, row: Row, tokens: Seq[int], shown_WF: mx.array) -> None:
        pass

    def propose(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        known = [row.last is not None for row in self.rows]
        widths = [depth * knows for depth, knows in zip(depths, known, strict=True)]
        if not any(widths):
            return [[] for _ in depths]
        lengths = [row.length for row in self.rows]
        donated, offset = self._donated(lengths), mx.array(lengths, mx.int32)
        state = self._states()
        tokens_B1 = mx.array(list(pending), mx.int32)[:, None]
        picks = Picks(self.model, samplers, [length + 1 for length in lengths])
        for _ in range(max(widths)):
            normed = self.model.step(self._target.embed(tokens_B1), state, donated, offset)
            tokens_B1, state = picks.next(normed), self.model.back(normed)
        return picks.proposals(widths)

    def _states(self) -> mx.array:
        sample = next(row.last for row in self.rows if row.last is not None)
        nothing = mx.zeros_like(sample)
        return mx.stack([nothing if row.last is None else row.last for row in self.rows])

    def _donated(self, lengths: Seq[int]) -> Donated:
        """Keys and values of each kind, and True (B, 1, 1, T) where the pending token may look."""
        assert self._rows is not None, "nobody showed the target's rows"
        donated = {}
        for kind, layer in self._donors.items():
            found = self._rows.donor(layer)
            assert found is not None, "the target has seen nothing"
            keys, values, starts = found
            window = self._target.specs[layer].window
            donated[kind] = keys, values, _seen(lengths, starts, keys.shape[2], window)
        return donated


def _seen(lengths: Seq[int], starts: Seq[int], slots: int, window: int) -> mx.array:
    """A row that holds nothing sees slot 0, so that its numbers, which nobody uses, are finite."""
    position = np.array(starts)[:, None] + np.arange(slots)[None]
    ends = np.array(lengths)[:, None]
    seen = position < ends
    if window:
        seen = seen & (position > ends - window)
    seen[:, 0] |= ~seen.any(axis=1)
    return mx.array(seen[:, None, None])
