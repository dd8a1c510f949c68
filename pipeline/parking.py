"""Rows that make way for others and go on later where they were."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pipeline.trace import leave
from pipeline.types import Batch, Proposal, Sequence, State


@dataclass
class Parked:
    """The state of a row that gave way; a Match, so that prefill starts the row from it."""

    state: State
    tier: str = "parked"

    def release(self) -> None: ...


def parked(sequences: Seq[Sequence]) -> list[Sequence]:
    """Those of a queue that have been running and keep their state."""
    return [s for s in sequences if isinstance(s.match, Parked)]


def who_gives_way(
    first: Sequence, active: Seq[Sequence], suffices: Callable[[list[Sequence]], bool]
) -> list[Sequence]:
    """The rows to park so that `first` can start: of lower priority only, so that no two park each
    other in turn; the lowest first, of these the newest. Empty if not even all of them suffice."""
    lower = [
        s
        for s in reversed(active)
        if s.request.priority < first.request.priority and s.processed_ids
    ]
    chosen: list[Sequence] = []
    for sequence in sorted(lower, key=lambda s: s.request.priority):
        chosen.append(sequence)
        if suffices(chosen):
            return chosen
    return []


def park(batch: Batch, leaving: Seq[Sequence]) -> None:
    """Take rows out of a batch between rounds. Each keeps an owned state of exactly what it has
    processed, from which it goes on with the same tokens."""
    batch.drop_ahead()
    states = [kept(batch, batch.sequences.index(sequence)) for sequence in leaving]
    stay = [row for row, s in enumerate(batch.sequences) if s not in leaving]
    batch.rows.filter(stay)
    batch.draft_rows.filter(stay)
    batch.sequences = [batch.sequences[row] for row in stay]
    for sequence, state in zip(leaving, states, strict=True):
        leave(sequence, batch)
        sequence.match = Parked(state)
        restart(sequence)


def restart(sequence: Sequence) -> None:
    """It has no row any more: what it had of a round is void, its tokens are not."""
    sequence.processed_ids, sequence.ready, sequence.scores = [], False, None
    sequence.proposal, sequence.emitted = Proposal(), []


def kept(batch: Batch, row: int) -> State:
    """An owned state of exactly what the row has processed, the drafter's included."""
    sequence = batch.sequences[row]
    state = batch.rows.capture(row, sequence.processed_ids, sequence.namespace)
    attachment = batch.draft_rows.capture(row)
    return state.with_attachment(attachment) if attachment else state
