"""Choices of one prompt, which is prefilled once for all of them.

The first to start leads: the others wait until its prompt is in, and start from a copy of its state, with
the adapters that it wears. One that comes too late for that looks for a saved prefix, like any other
request.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from pipeline.parking import Parked, kept
from pipeline.types import Batch, Sequence, State


def led(sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Whether it waits for another's prompt that is being prefilled."""
    if sequence.request.group is None or sequence.match is not None:
        return False
    return any(_same(sequence, leader) and not leader.ready for leader in running)


def share(batch: Batch, waiting: Seq[Sequence]) -> None:
    """Give the states of rows whose prompt is in to those that wait for them."""
    for row, leader in enumerate(batch.sequences):
        followers = [s for s in waiting if _same(s, leader) and _fresh(s)]
        if leader.ready and leader.live and len(leader.prompt_ids) > 1 and followers:
            state = _prompt_state(batch, row)
            for follower in followers:
                follower.match, follower.cached_len = Parked(state), len(state.tokens)
                follower.adapters, follower.namespace = leader.adapters, leader.namespace


def _prompt_state(batch: Batch, row: int) -> State:
    """Of the prompt but for its last token, with which each choice begins its first round."""
    leader = batch.sequences[row]
    first = leader.prompt_ids[:-1]
    if len(leader.processed_ids) == len(first):
        return kept(batch, row)
    return batch.rows.capture(row, first, leader.namespace)


def _same(one: Sequence, other: Sequence) -> bool:
    if one.request.group is None or one.request.group != other.request.group or one is other:
        return False
    return one.prompt_ids == other.prompt_ids and one.request.adapter == other.request.adapter


def _fresh(sequence: Sequence) -> bool:
    """It has not run, and wants nothing that only a run of its own can give."""
    asks = sequence.request.prompt_logprobs is not None
    return sequence.match is None and not sequence.output_ids and not asks
