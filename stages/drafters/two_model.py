"""A second, smaller language model of the same tokenizer drafts (Leviathan et al., 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.errors import OpenError
from pipeline.types import Attachment, Change, DraftRows, Owner, Proposal, Target
from stages.drafters.attached import attach, attached
from stages.drafters.choice import choice
from stages.rows.layouts import LAYOUTS
from stages.rows.rows import LayeredRows

CHUNK = 512  # tokens of one pass when rows catch up


class ModelRows:
    """The draft model's rows. They hold a prefix of what the target's rows hold; the rest is their lag
    and heads the next feed, so that the last of a fully accepted proposal, which nobody has fed yet,
    is no special case, and rounds without a draft cost nothing.

    A round feeds lag and pending in one pass, then one token a pass: `tail[b]` is what was fed beyond
    the target's tokens. Commit goes back to what of it was kept; layers that cannot forget go back to
    a mark instead, and what was kept becomes lag.
    """

    def __init__(self, model: Target, vocab_size: int, namespace: str, max_width: int):
        self._model, self._vocab_size, self._namespace = model, vocab_size, namespace
        self._step = max_width
        layouts = [LAYOUTS[spec.kind](spec, 2 * max_width) for spec in model.specs]
        self._rows = LayeredRows(layouts, model.specs, 2 * max_width)
        self._held: list[list[int]] = []
        self._tail: list[list[int]] = []
        self._marks: list[tuple[list[int], Any]] = []  # (lengths, mark), the earliest first

    @property
    def size(self) -> int:
        return len(self._held)

    # --- following the target

    def assign(self, owners: Seq[Owner]) -> None: ...

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self.consume(tokens)
        self._catch_up([len(ids) for ids in self._held])

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self.consume(inputs)

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        """What a draft left is settled here too: a fault after it makes its round one without."""
        lengths = [
            min(fed, len(held) + _common(tail, ids))
            for fed, held, tail, ids in zip(
                self._rows.lengths, self._held, self._tail, inputs, strict=True
            )
        ]
        self._back_to(lengths)
        for held, ids in zip(self._held, inputs, strict=True):
            held += ids

    def _back_to(self, lengths: list[int]) -> None:
        """Rows hold no more than this many tokens; of layers that cannot forget possibly fewer."""
        if lengths != list(self._rows.lengths):
            mark = self._marks[0][1]
            if not self._rows.forgets:
                fitting = [m for m in self._marks if all(map(int.__le__, m[0], lengths))]
                lengths, mark = fitting[-1]
            self._rows.rewind(lengths, mark)
        self._tail, self._marks = [[] for _ in self._held], []

    # --- drafting

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        self._back_to([min(n, len(h)) for n, h in zip(self._rows.lengths, self._held, strict=True)])
        depths = [self._room(row, depth) for row, depth in enumerate(depths)]
        found = [Proposal([], [], []) for _ in pending]
        if not any(depths):
            return list(found)
        active = [bool(depth) for depth in depths]
        self._catch_up([len(h) if a else 0 for h, a in zip(self._held, active, strict=True)], 1)
        self._marks = [(list(self._rows.lengths), self._rows.mark())]
        feed = [
            [*held[fed:], token] if asked else []
            for held, fed, token, asked in zip(
                self._held, self._rows.lengths, pending, active, strict=True
            )
        ]
        self._tail = [[token] if a else [] for token, a in zip(pending, active, strict=True)]
        for step in range(max(depths)):
            logits_BV = self._forward(feed)
            if step == 0:
                self._marks.append((list(self._rows.lengths), self._rows.mark()))
            for row, depth in enumerate(depths):
                if depth > step:
                    self._choose(found[row], logits_BV[row], samplers[row], self._place(row))
            feed = [
                [ids[step]] if depth > step + 1 else []
                for ids, depth in zip(found, depths, strict=True)
            ]
            for tail, ids in zip(self._tail, feed, strict=True):
                tail += ids
        return list(found)

    def _room(self, row: int, depth: int) -> int:
        """No position at or past the draft model's own context is ever run."""
        return max(0, min(depth, self._model.context_len - len(self._held[row]) - 1))

    def _place(self, row: int) -> int:
        """Absolute position of the token that follows what the row has been fed."""
        return len(self._held[row]) + len(self._tail[row])

    def _choose(self, found: Proposal, logits_V: np.ndarray, sampler: Any, position: int) -> None:
        """The row's own choice from the draft's scores, with the noise the target will have there."""
        scores_V = self._fitted(logits_V)
        weights = np.exp(scores_V - scores_V.max())
        found.confidence.append(float(1.0 / weights.sum(dtype=np.float64)))
        token, drawn = choice(scores_V, sampler, position, len(found))
        found.append(token)
        found.scores.append(scores_V if drawn else None)

    def _fitted(self, logits_V: np.ndarray) -> np.ndarray:
        """Scores over the target's vocabulary: ids beyond it are never proposed, nor ids we lack."""
        lacking = self._vocab_size - len(logits_V)
        if lacking <= 0:
            return logits_V[: self._vocab_size]
        return np.concatenate([logits_V, np.full(lacking, -np.inf, np.float32)])

    # --- passes

    def _catch_up(self, goals: Seq[int], spare: int = 0) -> None:
        """Feed rows up to `goals[b]` of the target's tokens, in chunks, so that with `spare` more
        tokens the rest is narrow enough to be taken back."""
        while True:
            todo = [
                min(goal, self._model.context_len) - fed
                for goal, fed in zip(goals, self._rows.lengths, strict=True)
            ]
            most = max(todo, default=0)
            if most <= (self._step - spare if spare else 0):
                return
            ragged = len(set(todo)) > 1 and not self._rows.forgets
            chunk = 2 * self._step if ragged else CHUNK  # wider padding would get into their state
            chunks = [
                held[fed : fed + max(0, min(chunk, due))]
                for held, fed, due in zip(self._held, self._rows.lengths, todo, strict=True)
            ]
            self._forward(chunks, score=False)

    def _forward(self, feed: Seq[Seq[int]], *, score: bool = True) -> Any:
        """One pass, all of it kept. logits_BV (host, float32) after each row's last token."""
        known = self._model.vocab_size
        round = self._rows.begin([[i if i < known else 0 for i in ids] for ids in feed])
        hidden_BWD = self._model.hidden(round.tokens_BW, round.caches)
        self._model.calls += 1
        logits_BV = None
        if score:
            last = mx.array([max(0, len(ids) - 1) for ids in feed])[:, None, None]
            last_B1D = mx.take_along_axis(hidden_BWD, last, axis=1)
            logits_BV = self._model.head(last_B1D)[:, 0].astype(mx.float32)
        round.launch(*([logits_BV] if score else []))
        round.resolve([len(ids) for ids in feed])
        return np.asarray(logits_BV) if score else round.wait()

    # --- membership and saved state

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        self._back_to([min(n, len(h)) for n, h in zip(self._rows.lengths, self._held, strict=True)])
        states = [
            attached(attachment, ids, self._namespace, self._model.specs)
            for ids, attachment in zip(tokens, attachments, strict=True)
        ]
        change = self._rows.prepare_append(states)
        return _Joining(self, change, [list(ids) for ids in tokens])

    def joined(self, fresh: list[list[int]]) -> None:
        self._held += fresh
        self._tail += [[] for _ in fresh]

    def filter(self, keep: Seq[int]) -> None:
        self._back_to([min(n, len(h)) for n, h in zip(self._rows.lengths, self._held, strict=True)])
        self._rows.filter(keep)
        self._held = [self._held[row] for row in keep]
        self._tail = [[] for _ in keep]

    def capture(self, row: int) -> Attachment | None:
        fed = self._rows.lengths[row]
        if self._tail[row] or not fed:
            return None
        return attach(self._rows.capture(row, self._held[row][:fed], self._namespace))

    def check_integrity(self) -> None:
        self._rows.check_integrity()
        for fed, held, tail in zip(self._rows.lengths, self._held, self._tail, strict=True):
            assert fed == len(held) + len(tail) if tail else fed <= len(held), (fed, len(held))

    def close(self) -> None:
        self._rows.close()
        self._held, self._tail = [], []


def _common(first: Seq[int], second: Seq[int]) -> int:
    """Length of the longest common beginning."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


class _Joining:
    """Rows of the draft model waiting to join."""

    def __init__(self, rows: ModelRows, change: Change, fresh: list[list[int]]):
        self._rows, self._change, self._fresh = rows, change, fresh

    def commit(self) -> None:
        self._change.commit()
        self._rows.joined(self._fresh)

    def dispose(self) -> None:
        self._change.dispose()


class TwoModel:
    """`draft_model` proposes token by token, all rows in one pass a step, with each row's own sampler
    and noise: what both models would draw is then accepted at any temperature.

    OpenError if a token means something else to the two models, or if layers of the draft model have
    no row layout. Vocabulary sizes may differ. Its weights are billed as the second model's.
    """

    can = frozenset({"refill", "external", "grade", "adapters"})
    prefill = "tail"
    taps: tuple[int, ...] = ()
    needs = {"draft_model": frozenset({"score"})}

    def __init__(self, target: Target, draft_model: Target):
        self._target, self._model = target, draft_model

    @property
    def namespace(self) -> str:
        """The artifact's name is known once the model is open."""
        return f"two_model:{getattr(self._model, 'artifact', '')}"

    @property
    def bytes_per_token(self) -> float:
        return sum(map(_bytes, getattr(self._model, "specs", ())))

    def open(self) -> None:
        if not self._model.vocab_size:
            raise OpenError("drafter=two_model needs a second model: draft_model=smollm2, say.")
        unknown = sorted({s.kind for s in self._model.specs if s.kind not in LAYOUTS})
        if unknown:
            raise OpenError(f"draft_model: no row layout for layers that are {', '.join(unknown)}.")
        same_tokens(self._target, self._model)

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        return ModelRows(self._model, target.vocab_size, self.namespace, max_width)


def same_tokens(target: Target, draft: Target) -> None:
    """OpenError naming the first id whose bytes differ. An id that one of the two has no bytes for is
    padding of its table, and harmless."""
    if target.tokenizer.identity == draft.tokenizer.identity:
        return
    for index in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = _piece(target, index), _piece(draft, index)
        if ours and theirs and ours != theirs:
            raise OpenError(
                f"draft_model: token {index} is {ours!r} to {target.name} and {theirs!r} to "
                f"{draft.name}: the two must share a tokenizer."
            )


def _piece(model: Target, index: int) -> bytes:
    try:
        return model.tokenizer.token_bytes(index)
    except (IndexError, KeyError, ValueError):
        return b""


def _bytes(spec: Any) -> float:
    """Of a token in one layer of the draft model; layers of a fixed size count as nothing."""
    if spec.kind == "recurrent":
        return 0.0
    _, sizes, dtype = spec.signature.split(":")
    shapes = [tuple(map(int, shape.split("x"))) for shape in sizes.split("+")]
    return sum(heads * size for heads, size in (shapes * 2)[:2]) * (
        4.0 if dtype == "float32" else 2.0
    )
