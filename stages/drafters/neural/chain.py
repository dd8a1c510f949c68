"""Drafting token by token: the drafter's own last state stands in for the target's (EAGLE, MTP).

Row i of the drafter's cache pairs the target's state at token i with the token after it. So what
the target showed of the last token waits for the next one, and the pending token is the first that
is put beside it: its output gives draft 1. What follows is made from the drafter's own states and
is gone from the cache when the round is over.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from stages.drafters.neural.rows import Row, SeenRows, drawn, padded, padded_ids


class ChainModel(Protocol):
    """What a family computes. H is what it hands from step to step, Vd its own vocabulary."""

    layers: int  # attention layers, each with a cache

    def enter(self, shown_BWF: mx.array) -> mx.array:
        """What the target showed, as `forward` takes it (B, W, H)."""

    def forward(self, tokens_BW: mx.array, state_BWH: mx.array, caches: Seq[Any]) -> mx.array:
        """The next states (B, W, H)."""

    def scores(self, state_BWH: mx.array) -> mx.array:
        """(B, W, Vd)."""

    def to_target(self, ids: mx.array) -> mx.array:
        """Ids of the target's vocabulary."""

    def spread(self, scores_Vd: np.ndarray) -> np.ndarray:
        """Scores over the target's vocabulary, -inf for what the drafter does not know."""


class ChainRows(SeenRows):
    """`DraftRows` of one chain model."""

    schema = "chain:1"

    def __init__(self, model: ChainModel, namespace: str, max_width: int):
        super().__init__(model.layers, namespace, max_width)
        self.model = model

    def wait(self, row: Row, tokens: Seq[int], shown_WF: mx.array) -> None:
        """Each token beside the state before it. A row's very first token has none."""
        if row.last is not None:
            row.tokens, row.shown = [*row.tokens, tokens[0]], [*row.shown, row.last]
        if len(tokens) > 1:
            row.tokens, row.shown = [*row.tokens, *tokens[1:]], [*row.shown, shown_WF[:-1]]

    def run(self, tokens: Seq[Seq[int]], shown: Seq[Seq[mx.array]]) -> mx.array:
        """States (B, W, H), of which row b's first len(tokens[b]) columns are real."""
        widths = [len(ids) for ids in tokens]
        entered = self.model.enter(padded(shown, max(widths)))
        return self._forward(padded_ids(tokens), entered, widths)

    def _forward(self, tokens_BW: mx.array, state: mx.array, widths: Seq[int]) -> mx.array:
        round = self.cache.begin([[0] * width for width in widths])
        state = self.model.forward(tokens_BW, state, round.caches)
        round.launch(state)
        round.resolve(widths)
        return state

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        starts = [row.last if depth else None for row, depth in zip(self.rows, depths, strict=True)]
        known = [start is not None for start in starts]
        if not any(known):
            return [[] for _ in depths]
        steps = max(depth * knows for depth, knows in zip(depths, known, strict=True))
        ids = self._chain(pending, starts, steps, samplers)
        return [ids[row, :depth].tolist() if known[row] else [] for row, depth in enumerate(depths)]

    def _chain(
        self, pending: Seq[int], starts: Seq[mx.array | None], steps: int, samplers: Seq[Any]
    ) -> np.ndarray:
        """(B, steps) drafted ids. The cache keeps what had been waiting and nothing else."""
        tokens, shown = [row.tokens for row in self.rows], [row.shown for row in self.rows]
        held = [n + len(ids) for n, ids in zip(self.cache.lengths, tokens, strict=True)]
        for index, start in enumerate(starts):
            if start is not None:
                tokens[index] = [*tokens[index], pending[index]]
                shown[index] = [*shown[index], start]
        states = self.run(tokens, shown)
        self.forget_waiting()
        last = mx.array([[max(0, len(ids) - 1)] for ids in tokens])
        state = mx.take_along_axis(states, last[:, :, None], axis=1)
        ids = [self._pick(state, samplers, 0)]
        for step in range(1, steps):
            widths = [int(start is not None) for start in starts]
            state = self._forward(ids[-1], state, widths)
            ids.append(self._pick(state, samplers, step))
        self.cache.lengths = held
        return np.asarray(mx.concatenate(ids, axis=1))

    def _pick(self, state_B1H: mx.array, samplers: Seq[Any], step: int) -> mx.array:
        """(B, 1) ids to follow, of the target's vocabulary."""
        scores_BV = self.model.scores(state_B1H)[:, -1]
        positions = [row.length + 1 + step for row in self.rows]
        sampled = drawn(scores_BV, samplers, positions, self.model.spread)
        if sampled is None:
            sampled = self.model.to_target(mx.argmax(scores_BV, axis=-1))
        return sampled[:, None]
