"""What history and the request's bias do to scores, before anything is chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import RequestError
from pipeline.types import Sampling

if TYPE_CHECKING:
    from stages.samplers.filters import Floats, Ids


class History:
    """The distinct tokens of one row with how often each was emitted, as arrays that grow.

    Prompt tokens are held with count 0: repetition sees them, presence and frequency do not.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()):
        distinct = np.array(list(dict.fromkeys(prompt_ids)), dtype=np.int64)
        self._slots = {int(token): slot for slot, token in enumerate(distinct)}
        self._ids = distinct
        self._counts = np.zeros(len(distinct), dtype=np.float32)

    def push(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._grow()
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def _grow(self) -> None:
        room = max(16, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Floats:
        return self._counts[: len(self._slots)]


class Penalties:
    """logit_bias, then repetition over prompt and output, then presence and frequency over output.

    Repetition divides positive scores and multiplies negative ones (Keskar et al., CTRL, 2019);
    presence and frequency are subtracted as in OpenAI's API: presence once, frequency per count.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Iterable[int]):
        self._repetition = np.float32(sampling.repetition_penalty or 1.0)
        self._presence = np.float32(sampling.presence_penalty or 0.0)
        self._frequency = np.float32(sampling.frequency_penalty or 0.0)
        bias = dict(sampling.logit_bias or ())
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        repeats = self._repetition != 1
        self._remembers = bool(repeats or self._presence or self._frequency)
        self._seen_before = list(prompt_ids) if repeats else []
        self.restart(())

    def restart(self, output_ids: Iterable[int]) -> None:
        """Remember the prompt and these output tokens, and nothing else."""
        self._history = History(self._seen_before)
        for token_id in output_ids:
            self.push(token_id)

    @property
    def neutral(self) -> bool:
        """Never changes a score."""
        return not (self._remembers or len(self._bias))

    def push(self, token_id: int) -> None:
        if self._remembers:
            self._history.push(token_id)

    def apply(self, logits_V: Floats) -> Floats:
        """The changed scores, a new array; `logits_V` itself where nothing changes.
        RequestError for a bias on an id outside the vocabulary."""
        if self.neutral:
            return logits_V
        changed = logits_V.copy()
        if len(self._bias):
            self._add_bias(changed)
        if self._remembers:
            self._penalize(changed)
        return changed

    def _add_bias(self, logits_V: Floats) -> None:
        if self._bias_ids.max() >= len(logits_V) or self._bias_ids.min() < 0:
            raise RequestError(
                f"logit_bias names a token outside the vocabulary of {len(logits_V)}",
                param="logit_bias",
            )
        logits_V[self._bias_ids] += self._bias

    def _penalize(self, logits_V: Floats) -> None:
        ids, counts = self._history.ids, self._history.counts
        scores = logits_V[ids]
        scores = np.where(scores > 0, scores / self._repetition, scores * self._repetition)
        logits_V[ids] = scores - self._presence * (counts > 0) - self._frequency * counts
