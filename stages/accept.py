"""Read the round's scores back to the host, once, and decide what the target agrees with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.types import Batch, Rule, Sequence, Target


class Accept:
    """For each live row with scores: the emitted tokens and how many drafts they confirm.

    A row's scores are whatever `numpy.asarray` makes logits_LV of, L = 1 + len(proposal). Rows
    without scores or no longer live emit nothing. Scores that cannot be read are the batch's
    failure and raise; what fails in choosing from them is that row's own `error`.
    """

    reads = frozenset(
        {"proposal", "scores", "sampler", "output_ids", "prompt_ids", "request", "max_new"}
    )
    writes = frozenset({"emitted", "accepted"})
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, target: Target, rule: Rule):
        self._target, self._rule = target, rule

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            sequence.emitted, sequence.accepted = [], 0
        rows = [s for s in batch.sequences if s.live and s.scores is not None]
        windows = [np.asarray(s.scores, dtype=np.float32) for s in rows]
        for sequence, logits_LV in zip(rows, windows, strict=True):
            try:
                self._walk(sequence, logits_LV)
            except Exception as error:  # one row's fault is never another's
                sequence.emitted, sequence.accepted, sequence.error = [], 0, error

    def _walk(self, sequence: Sequence, logits_LV: Any) -> None:
        eos_ids = frozenset[int]() if sequence.request.ignore_eos else self._target.eos_ids
        room = sequence.max_new - len(sequence.output_ids)
        sequence.emitted, sequence.accepted = self._rule.accept(sequence, logits_LV, room, eos_ids)
