"""Publish the state of processed tokens, so that the next request starts from it."""

from __future__ import annotations

import logging

from pipeline.errors import below, refuse
from pipeline.types import Batch, Rows, Sequence, Target, Tier


class CheckpointCapture:
    """In `prefill` at the template boundary (and at snapshots on the way to it), in `finish` for all delivered tokens.

    Never for a cancelled or failed row, never for a pending, rejected or undelivered token. What the
    tier already holds is not copied again.
    """

    reads = frozenset(
        {
            "request",
            "boundary",
            "snapshot_len",
            "namespace",
            "cached_len",
            "processed_ids",
            "captured_len",
            "finish_reason",
        }
    )
    writes = frozenset({"captured_len"})
    needs = {"kv": frozenset({"snapshot"})}
    thread = "owner"

    def __init__(self, target: Target, tier: list[Tier], *, min_tokens: int = 16):
        refuse(min_tokens=below(min_tokens, 1, "tokens"))
        self.target, self.tiers, self.min_tokens = target, tier, min_tokens

    def run(self, batch: Batch) -> None:
        if not self.tiers:
            return
        for row, sequence in enumerate(batch.sequences):
            length = self._due(batch.rows, sequence)
            if length >= self.min_tokens and length > sequence.captured_len:
                self._try(batch, row, sequence, length)

    def _due(self, rows: Rows, sequence: Sequence) -> int:
        """How many of the row's tokens to publish now; 0: none."""
        processed = len(sequence.processed_ids)
        if sequence.cancelled or sequence.error:
            return 0
        if sequence.finish_reason is not None:
            return processed
        if not rows.cuttable_later(sequence.boundary):
            return processed if processed == sequence.snapshot_len else 0
        # the end of the row will be published and can be cut: only much that is new is worth a copy now
        much = sequence.boundary - sequence.cached_len >= self.min_tokens
        return sequence.boundary if much and processed >= sequence.boundary else 0

    def _try(self, batch: Batch, row: int, sequence: Sequence, length: int) -> None:
        try:
            self._publish(batch, row, sequence, length)
        except Exception:
            logging.getLogger(__name__).warning("a state was not published", exc_info=True)
        sequence.captured_len = length

    def _publish(self, batch: Batch, row: int, sequence: Sequence, length: int) -> None:
        tokens, tier = sequence.processed_ids[:length], self.tiers[0]
        kind = batch.rows.reusable_from(row, length)
        start = min(tier.covered(tokens, sequence.namespace, kind), len(tokens) - 1)
        state = batch.rows.capture(row, tokens, sequence.namespace, start)
        whole = length == len(sequence.processed_ids)
        attachment = batch.draft_rows.capture(row) if whole else None
        tier.put(state.with_attachment(attachment) if attachment else state)
        session = sequence.request.session_id
        if session is not None and sequence.finish_reason is not None:
            for keeper in (tier for tier in self.tiers if "sessions" in tier.can):
                keeper.keep(session, tokens, sequence.namespace)
