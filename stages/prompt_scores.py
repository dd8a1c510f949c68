"""Log-probabilities of a prompt's own tokens, taken chunk by chunk while the chunk's output is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from pipeline.types import PromptLogprob, Sequence, Target
from stages.samplers.row import finite_peak, token_logprob

if TYPE_CHECKING:
    from stages.samplers.filters import Floats

COLUMNS = 32  # positions whose scores exist at one time: V float32 each


def score_chunk(target: Target, sequence: Sequence, hidden_WD: mx.array) -> None:
    """Take the chunk that begins where `processed_ids` ends; a failure is the row's own. What a lost
    row had already is kept as it was."""
    start = len(sequence.processed_ids)
    following = sequence.prompt_ids[start + 1 :][: hidden_WD.shape[0]]
    count = sequence.request.prompt_logprobs or 0
    known = len(sequence.prompt_logprobs) - start
    sequence.prompt_hidden = hidden_WD
    try:
        rows = zip(following, logits_rows(target, hidden_WD, len(following)), strict=True)
        found = [prompt_logprob(logits_V, token, count) for token, logits_V in rows]
    except Exception as error:
        sequence.error = error
        return
    sequence.prompt_logprobs = [*sequence.prompt_logprobs, *found[max(0, known) :]]


def logits_rows(target: Target, hidden_WD: mx.array, count: int) -> Iterator[Floats]:
    """logits_V (float32, host) of the first `count` positions, a few of them in memory at a time."""
    for first in range(0, count, COLUMNS):
        logits_1NV = target.head(hidden_WD[None, first : min(first + COLUMNS, count)])
        yield from np.asarray(logits_1NV[0].astype(mx.float32))


def prompt_logprob(logits_V: Floats, token_id: int, count: int) -> PromptLogprob:
    """As vLLM counts: rank 1 is the best; equal scores share the best rank they could have."""
    finite_peak(logits_V)
    scored = token_logprob(logits_V, token_id, count)
    rank = 1 + int(np.count_nonzero(logits_V > logits_V[token_id]))
    return PromptLogprob(token_id, scored.logprob, rank, scored.top)
