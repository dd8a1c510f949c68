"""Find the longest saved state a request can start from."""

from __future__ import annotations

from pipeline.types import Batch, Match, Sequence, Tier


class PrefixLookup:
    """Asks every tier; the longest usable prefix wins, ties go to the earlier (faster) tier.

    At least the last token is left to be run. A tier that fails is a miss.
    """

    reads = frozenset({"request", "prompt_ids", "output_ids", "namespace", "processed_ids"})
    writes = frozenset({"match", "cached_len"})
    needs: dict[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, tier: list[Tier]):
        self.tiers = tier

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.match is None and not sequence.processed_ids:
                self._look(sequence)

    def _look(self, sequence: Sequence) -> None:
        known = sequence.prompt_ids + sequence.output_ids
        best: Match | None = None
        for tier in self.tiers:
            match = tier.lookup(known, sequence.namespace, len(known) - 1)
            if match is None:
                continue
            worse = match if best and len(match.state.tokens) <= len(best.state.tokens) else best
            best = match if worse is best else best
            if worse is not None:
                worse.release()
        sequence.match = best
        if best is not None and not sequence.output_ids:
            sequence.cached_len = min(len(best.state.tokens), len(sequence.prompt_ids))
