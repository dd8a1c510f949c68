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

from stages.drafters.neural.rows import (
    Row,
    SeenRows,
    best_chance,
    drawn,
    greedy,
    padded,
    padded_ids,
    proposal,
)


class Scorer(Protocol):
    """What a family's states say of tokens. H is a state's size, Vd the drafter's own vocabulary."""

    def scores(self, state_BWH: mx.array) -> mx.array:
        """(B, W, Vd)."""

    def to_target(self, ids: mx.array) -> mx.array:
        """Ids of the target's vocabulary."""

    def spread(self, scores_Vd: np.ndarray) -> np.ndarray:
        """Scores over the target's vocabulary, -inf for what the drafter does not know."""


class ChainModel(Scorer, Protocol):
    """What a family hands from step to step."""

    layers: int  # attention layers, each with a cache

    def enter(self, shown_BWF: mx.array) -> mx.array:
        """What the target showed, as `forward` takes it (B, W, H)."""

    def forward(self, tokens_BW: mx.array, state_BWH: mx.array, caches: Seq[Any]) -> mx.array:
        """The next states (B, W, H)."""


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

    def propose(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        starts = [row.last if depth else None for row, depth in zip(self.rows, depths, strict=True)]
        known = [start is not None for start in starts]
        widths = [depth * knows for depth, knows in zip(depths, known, strict=True)]
        if not any(widths):
            return [[] for _ in depths]
        picks = Picks(self.model, samplers, [row.length + 1 for row in self.rows])
        state = self._first(pending, starts)
        tokens_B1 = picks.next(state)
        for _ in range(1, max(widths)):
            state = self._forward(tokens_B1, state, [int(knows) for knows in known])
            tokens_B1 = picks.next(state)
        self.cache.lengths = [
            n - w for n, w in zip(self.cache.lengths, _made_up(widths), strict=True)
        ]
        return picks.proposals(widths)

    def _first(self, pending: Seq[int], starts: Seq[mx.array | None]) -> mx.array:
        """What waits and then the pending token through the drafter: its output, (B, 1, H)."""
        tokens, shown = [row.tokens for row in self.rows], [row.shown for row in self.rows]
        for index, start in enumerate(starts):
            if start is not None:
                tokens[index] = [*tokens[index], pending[index]]
                shown[index] = [*shown[index], start]
        states = self.run(tokens, shown)
        self.forget_waiting()
        last = mx.array([[max(0, len(ids) - 1)] for ids in tokens])
        return mx.take_along_axis(states, last[:, :, None], axis=1)


def _made_up(widths: Seq[int]) -> list[int]:
    """Inputs of a draft that each row's cache is to forget again: pending, and all drafts but one of
    the longest proposal, since rows run together."""
    return [max(widths) * bool(width) for width in widths]


class Picks:
    """The tokens chosen step by step: on the device while all rows are greedy."""

    def __init__(self, model: Scorer, samplers: Seq[Any], positions: Seq[int]):
        self.model, self.samplers, self.positions = model, samplers, positions
        self.greedy = greedy(samplers)
        self.chosen: list[mx.array] = []  # (B, 1) each
        self.sure: list[mx.array] = []  # (B,) each
        self.sources: list[list[np.ndarray | None]] = []

    def next(self, state_B1H: mx.array) -> mx.array:
        scores_BV = self.model.scores(state_B1H)[:, -1]
        if self.greedy:
            ids = self.model.to_target(mx.argmax(scores_BV, axis=-1))
            sources: list[np.ndarray | None] = [None] * len(self.positions)
        else:
            place = len(self.chosen)
            at = [position + place for position in self.positions]
            drawn_ids, sources = drawn(scores_BV, self.samplers, at, place, self.model.spread)
            ids = mx.array(drawn_ids, mx.int32)
        self.chosen.append(ids[:, None])
        self.sure.append(best_chance(scores_BV))
        self.sources.append(sources)
        return self.chosen[-1]

    def proposals(self, widths: Seq[int]) -> list[list[int]]:
        """The first `widths[b]` of each row."""
        ids_BW, sure_BW = mx.concatenate(self.chosen, axis=1), mx.stack(self.sure, axis=1)
        mx.eval(ids_BW, sure_BW)
        ids, sure = np.asarray(ids_BW), np.asarray(sure_BW)
        return [
            proposal(ids[row], sure[row], width, [at[row] for at in self.sources])
            for row, width in enumerate(widths)
        ]
