"""Rows of a drafter that reads the target's hidden states and keeps keys and values of its own.

What the target shows of kept tokens waits on the row until the drafter runs next, so that a round
without drafting costs nothing but the waiting; then all rows' waiting inputs go through the drafter
in one ragged pass. Only what the target itself has seen stays in the drafter's cache: what it made
up while drafting is rolled back. Positions count from the row's first input here: these families
depend on differences of positions only (drafters.md 0.5), so a row may start cold in mid-text.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.types import (
    Attachment,
    Change,
    LayerSlice,
    LayerSpec,
    Owner,
    Proposal,
    Segment,
    State,
)
from stages.drafters.choice import choice
from stages.rows.attention import AttentionLayout
from stages.rows.rows import LayeredRows, Prepared
from stages.rows.state import owned

SPEC = LayerSpec("full")
MOST_WAITING = 64  # tokens a row lets wait before the drafter takes them without drafting


@dataclass
class Row:
    """One row's place. `last` is the hidden state of the last token taken in, (1, F)."""

    length: int = 0  # tokens taken in, as the target's row
    last: mx.array | None = None
    tokens: list[int] = field(default_factory=list)  # waiting, with what the target showed:
    shown: list[mx.array] = field(default_factory=list)  # (n, F) each


class SeenRows:
    """`DraftRows` over `layers` attention layers; subclasses say what a token's input is."""

    schema = "seen:1"

    def __init__(self, layers: int, namespace: str, max_width: int):
        self.namespace = namespace
        layouts = [AttentionLayout(SPEC, max_width) for _ in range(layers)]
        self.cache = LayeredRows(layouts, [SPEC] * layers, max_width)
        self.rows: list[Row] = []

    @property
    def size(self) -> int:
        return len(self.rows)

    # --- what a subclass does

    def wait(self, row: Row, tokens: Seq[int], shown_WF: mx.array) -> None:
        """Let these inputs wait; `row.last` is still that of the token before them."""
        raise NotImplementedError

    def run(self, tokens: Seq[Seq[int]], shown: Seq[Seq[mx.array]]) -> mx.array:
        """Put these inputs of each row (ragged) through the drafter and into its cache."""
        raise NotImplementedError

    def propose(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """`draft` itself."""
        raise NotImplementedError

    # --- tokens

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """A fault leaves the rows as they were: what they know can still be captured, and nobody else
        than its row need start cold."""
        lengths = list(self.cache.lengths)
        waiting = [(row.tokens, row.shown) for row in self.rows]
        try:
            return self.propose(pending, depths, samplers)
        except Exception:
            self.cache.lengths = lengths
            for row, (tokens, shown) in zip(self.rows, waiting, strict=True):
                row.tokens, row.shown = tokens, shown
            raise

    def assign(self, owners: Seq[Owner]) -> None: ...

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self.consume(tokens, hidden)
        self.flush()
        mx.eval(self.cache.arrays(), [row.last for row in self.rows if row.last is not None])

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self.consume(inputs, hidden)

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        for index, (row, tokens) in enumerate(zip(self.rows, inputs, strict=True)):
            if tokens:
                shown_WF = hidden[index, : len(tokens)]
                self.wait(row, tokens, shown_WF)
                row.last, row.length = shown_WF[-1:], row.length + len(tokens)
        if any(len(row.tokens) >= MOST_WAITING for row in self.rows):
            self.flush()

    def flush(self) -> None:
        """Nothing waits any more."""
        if any(row.tokens for row in self.rows):
            self.run([row.tokens for row in self.rows], [row.shown for row in self.rows])
        self.forget_waiting()

    def forget_waiting(self) -> None:
        for row in self.rows:
            row.tokens, row.shown = [], []

    # --- membership

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        fits = [self._fitting(*pair) for pair in zip(tokens, attachments, strict=True)]
        rows = [
            Row(len(ids), attachment.tensors[-1] if attachment else None)
            for ids, attachment in zip(tokens, fits, strict=True)
        ]
        change = self.cache.prepare_append([_state(attachment) for attachment in fits])

        def install() -> None:
            change.commit()
            self.rows = [*self.rows, *rows]

        return Prepared(install)

    def _fitting(self, tokens: Seq[int], attachment: Attachment | None) -> Attachment | None:
        """An attachment of another drafter, method or length is none: the row starts cold."""
        if attachment is None or attachment.namespace != self.namespace:
            return None
        fits = attachment.schema == self.schema and attachment.metadata["tokens"] == len(tokens)
        return attachment if fits else None

    def filter(self, keep: Seq[int]) -> None:
        self.cache.filter(keep)
        self.rows = [self.rows[index] for index in keep]

    def capture(self, row: int) -> Attachment | None:
        self.flush()
        mine = self.rows[row]
        if mine.last is None:
            return None
        held, tensors = self.cache.lengths[row], []
        if held:
            layers = self.cache.capture(row, [0] * held, "").segments[0].layers
            for layer in layers:
                assert layer is not None
                tensors += [layer.arrays["keys"], layer.arrays["values"]]
        last = owned(mine.last[None])[0]
        mx.eval(last)
        metadata: Mapping[str, int] = {"tokens": mine.length, "held": held}
        return Attachment(self.namespace, self.schema, metadata, (*tensors, last))

    def check_integrity(self) -> None:
        assert self.cache.size == len(self.rows), (self.cache.size, len(self.rows))
        for row, held in zip(self.rows, self.cache.lengths, strict=True):
            assert len(row.tokens) == sum(shown.shape[0] for shown in row.shown)
            assert held + len(row.tokens) <= row.length + 1, (held, len(row.tokens), row.length)
        self.cache.check_integrity()

    def close(self) -> None:
        self.cache.close()
        self.rows = []


def _state(attachment: Attachment | None) -> State | None:
    """The drafter's own keys and values as rows take them."""
    held = int(attachment.metadata["held"]) if attachment else 0
    if attachment is None or not held:
        return None
    pairs = zip(attachment.tensors[0:-1:2], attachment.tensors[1:-1:2], strict=True)
    layers = tuple(LayerSlice(0, {"keys": k, "values": v}) for k, v in pairs)
    return State((0,) * held, "", (SPEC,) * len(layers), (Segment(0, held, layers),))


def padded_ids(tokens: Seq[Seq[int]]) -> mx.array:
    """Ragged ids as one int32 (B, W), zeros after each row's end."""
    ids_BW = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
    for row, ids in enumerate(tokens):
        ids_BW[row, : len(ids)] = ids
    return mx.array(ids_BW)


def padded(shown: Seq[Seq[mx.array]], width: int) -> mx.array:
    """Ragged (n, F) pieces of each row as one (B, width, F); some row has a piece."""
    sample = next(piece for pieces in shown for piece in pieces)
    rows = []
    for pieces in shown:
        missing = width - sum(piece.shape[0] for piece in pieces)
        filler = mx.zeros((missing, sample.shape[1]), sample.dtype)
        rows.append(mx.concatenate([*pieces, filler]))
    return mx.stack(rows)


def drawn(
    logits_BV: mx.array, samplers: Seq[Any], positions: Seq[int], place: int, spread: Any
) -> tuple[list[int], list[np.ndarray | None]]:
    """What each row chooses from these scores at `place` of its proposal, and what it was drawn from
    (None: not drawn). `positions` are absolute; `spread` makes host scores over the target's
    vocabulary."""
    host_BV = np.asarray(logits_BV.astype(mx.float32))
    ids: list[int] = []
    sources: list[np.ndarray | None] = []
    for scores, sampler, position in zip(host_BV, samplers, positions, strict=True):
        scores_V = spread(scores)
        token, sampled = choice(scores_V, sampler, position, place)
        ids.append(token)
        sources.append(scores_V if sampled else None)
    return ids, sources


def greedy(samplers: Seq[Any]) -> bool:
    """Whether all rows want the best token, so that nothing need be read back on the way."""
    return all(sampler is None or sampler.greedy for sampler in samplers)


def best_chance(scores_BV: mx.array) -> mx.array:
    """The drafter's own probability of its best token, (B,)."""
    return mx.exp(scores_BV.max(-1) - mx.logsumexp(scores_BV, axis=-1)).astype(mx.float32)


def proposal(
    ids_W: np.ndarray, sure_W: np.ndarray, width: int, sources: Seq[np.ndarray | None]
) -> Proposal:
    """One row's first `width` ids with the drafter's confidence in each; `sources` is what they were
    drawn from, None for those that were not drawn."""
    drawn = any(source is not None for source in sources[:width])
    scores = list(sources[:width]) if drawn else []  # in their places: scores[i] made id i
    return Proposal(ids_W[:width].tolist(), sure_W[:width].tolist(), scores)
