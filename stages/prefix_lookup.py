"""Find the longest saved state a request can start from."""

from __future__ import annotations

import logging

from pipeline.types import Batch, Match, Sequence, Tier


class PrefixLookup:
    """Asks every tier; the longest usable prefix wins, ties go to the earlier (faster) tier.

    At least the last token is left to be run. A tier that fails is a miss. Who wants the prompt's own
    log-probabilities has to run all of it.
    """

    reads = frozenset({"request", "prompt_ids", "output_ids", "namespace", "processed_ids"})
    writes = frozenset({"match", "cached_len"})
    needs: dict[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, tier: list[Tier]):
        self.tiers = tier

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.request.prompt_logprobs is not None:
                continue
            if sequence.match is None and not sequence.processed_ids:
                self._look(sequence)

    def _look(self, sequence: Sequence) -> None:
        known = sequence.prompt_ids + sequence.output_ids
        found = [self._ask(tier, known, sequence.namespace) for tier in self.tiers]
        matches = [match for match in found if match is not None]
        sequence.match = max(matches, key=lambda m: len(m.state.tokens), default=None)
        for match in matches:
            if match is not sequence.match:
                match.release()
        if sequence.match is not None and "suspect" not in sequence.counts:
            sequence.cached_len = len(sequence.match.state.tokens)

    def _ask(self, tier: Tier, known: list[int], namespace: str) -> Match | None:
        try:
            return tier.lookup(known, namespace, len(known) - 1)
        except Exception:
            logging.getLogger(__name__).warning("tier %s failed: a miss", tier.name, exc_info=True)
            return None
