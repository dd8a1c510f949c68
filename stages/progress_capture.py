"""Keep what an answer under way has got to, so that a crash or a disconnect does not lose it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pipeline.errors import at_least
from pipeline.types import Batch, Drafter, Sequence, Tier
from stages.progress import Progress
from stages.resume import attempts_of


class ProgressCapture:
    """In `first` and `decode`, last: a capture at an answer's first token, then at least every
    `checkpoint_tokens` emitted ones; the disk's own thread writes it while rows go on. In `finish` it lets
    go: of a complete answer nothing stays to be resumed, of a cancelled one all that is written.

    A capture holds the processed tokens (only what the disk lacks is copied), the pending one, the seed
    and the log-probabilities. A drafter's own state goes along where it could not be made again from
    the tokens. No further capture of an answer while one is being written.
    """

    reads = frozenset(
        {"request", "prompt_ids", "output_ids", "processed_ids", "pending", "emitted", "namespace",
         "seed", "max_new", "finish_reason", "progress"}
    )  # fmt: skip
    writes = frozenset({"progress"})
    needs = {"kv": frozenset({"snapshot"}), "tier": frozenset({"resume"})}
    thread = "owner"

    def __init__(self, drafter: Drafter, tier: list[Tier], *, checkpoint_tokens: int = 64):
        self.every = at_least("checkpoint_tokens", checkpoint_tokens, 1)
        self.drafter, self.tiers = drafter, tier
        self._told = False

    def open(self) -> None:
        self.tier = next(tier for tier in self.tiers if "resume" in tier.can)
        self.attempts = attempts_of(self.tiers)

    def run(self, batch: Batch) -> None:
        for row, sequence in enumerate(batch.sequences):
            if sequence.progress is not None:
                self._safely(self._look, batch, row, sequence, sequence.progress)
        self._safely(self.attempts.step)

    def _safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """A disk that fails costs captures, no answer; said once, for it fails at every round."""
        try:
            work(*arguments)
        except Exception:
            if not self._told:
                logging.getLogger(__name__).warning("an answer was not captured", exc_info=True)
            self._told = True

    def _look(self, batch: Batch, row: int, sequence: Sequence, progress: Progress) -> None:
        if not sequence.live:
            if not sequence.cancelled:
                self.attempts.end(progress.attempt)
            sequence.progress = None
        elif sequence.max_new > self.every:  # a shorter answer is begun again
            progress.hear(sequence)
            self._follow(batch, row, sequence, progress)

    def _follow(self, batch: Batch, row: int, sequence: Sequence, progress: Progress) -> None:
        waits, emitted = progress.waits, len(sequence.output_ids)
        progress.waits = self.attempts.under_way(progress.attempt)
        if waits and not progress.waits:
            progress.lag = emitted - progress.captured
        if progress.waits or emitted < progress.due(self.every):
            return
        progress.captured = emitted
        progress.waits = self._capture(batch, row, sequence, progress)

    def _capture(self, batch: Batch, row: int, sequence: Sequence, progress: Progress) -> bool:
        """False where there is nothing that could be gone on from."""
        tokens = sequence.processed_ids
        known = sequence.prompt_ids + sequence.output_ids[:-1]
        if tokens != known or not progress.complete(sequence):
            return False
        batch.drop_ahead()  # the layers' arrays hold what it would write
        kind = batch.rows.reusable_from(row, len(tokens))
        start = min(self.tier.covered(tokens, sequence.namespace, kind), len(tokens) - 1)
        state = batch.rows.capture(row, tokens, sequence.namespace, start)
        if "refill" not in self.drafter.can and (own := batch.draft_rows.capture(row)):
            state = state.with_attachment(own)
        return self.attempts.take(
            progress.attempt, state.with_attachment(progress.record(sequence))
        )
