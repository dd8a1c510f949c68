"""Publish the state of processed tokens, so that the next request starts from it."""

from __future__ import annotations

from pipeline.types import Batch, Sequence, Tier


class CheckpointCapture:
    """In `prefill` at the template boundary, in `finish` for all delivered tokens.

    Never for a cancelled or failed row, never for a pending, rejected or undelivered token. What the
    tier already holds is not copied again.
    """

    reads = frozenset(
        {"request", "boundary", "namespace", "processed_ids", "captured_len", "finish_reason"}
    )
    writes = frozenset({"captured_len"})
    needs = {"kv": frozenset({"snapshot"})}
    thread = "owner"

    def __init__(self, tier: list[Tier], *, min_tokens: int = 16):
        if min_tokens < 1:
            raise ValueError(f"min_tokens: wants >= 1 tokens, got {min_tokens}")
        self.tiers, self.min_tokens = tier, min_tokens

    def run(self, batch: Batch) -> None:
        if not self.tiers:
            return
        for row, sequence in enumerate(batch.sequences):
            if self._due(sequence):
                self._publish(batch, row, sequence)

    def _due(self, sequence: Sequence) -> bool:
        processed = len(sequence.processed_ids)
        if sequence.cancelled or sequence.error or processed <= sequence.captured_len:
            return False
        wanted = sequence.finish_reason in ("stop", "length") or processed == sequence.boundary
        return wanted and processed >= self.min_tokens

    def _publish(self, batch: Batch, row: int, sequence: Sequence) -> None:
        tokens, tier = list(sequence.processed_ids), self.tiers[0]
        start = min(tier.covered(tokens, sequence.namespace), len(tokens) - 1)
        state = batch.rows.capture(row, tokens, sequence.namespace, start)
        attachment = batch.draft_rows.capture(row)
        tier.put(state.with_attachment(attachment) if attachment else state)
        sequence.captured_len = len(tokens)
