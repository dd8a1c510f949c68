"""Find the longest saved state a request can start from."""

from __future__ import annotations

import logging

from pipeline.types import Batch, Match, Sequence, Tier

ATTEMPTS = 4  # a tier whose states turn out to be bad is asked again, but not for ever


class PrefixLookup:
    """The longest usable prefix over all tiers wins, ties go to the earlier (faster) one; only the
    winner is read.

    At least the last token is left to be run. A tier that fails is a miss. Who wants the prompt's own
    log-probabilities has to run all of it.
    """

    reads = frozenset({"request", "prompt_ids", "output_ids", "namespace", "processed_ids"})
    writes = frozenset({"match", "cached_len"})
    needs: dict[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, tier: list[Tier]):
        self.tiers = tier
        self._told: set[str] = set()

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.request.prompt_logprobs is not None:
                continue
            if sequence.match is None and not sequence.processed_ids:
                self._look(sequence)

    def _look(self, sequence: Sequence) -> None:
        known = sequence.prompt_ids + sequence.output_ids
        sequence.match = self._best(known, sequence.namespace)
        if sequence.match is not None and "suspect" not in sequence.counts:
            sequence.cached_len = len(sequence.match.state.tokens)

    def _best(self, known: list[int], namespace: str) -> Match | None:
        """Ask the tier that promises most; if it gives less, look whether another has more now."""
        for _ in range(ATTEMPTS):
            promised = [self._usable(tier, known, namespace) for tier in self.tiers]
            if not (most := max(promised, default=0)):
                break
            match = self._ask(self.tiers[promised.index(most)], known, namespace)
            if match is not None and len(match.state.tokens) == most:
                return match
            if match is not None:
                match.release()
        for tier in self.tiers:
            if match := self._ask(tier, known, namespace):
                return match
        return None

    def _usable(self, tier: Tier, known: list[int], namespace: str) -> int:
        try:
            return tier.usable(known, namespace, len(known) - 1)
        except Exception:
            self._tell(tier)
            return 0

    def _ask(self, tier: Tier, known: list[int], namespace: str) -> Match | None:
        try:
            return tier.lookup(known, namespace, len(known) - 1)
        except Exception:
            self._tell(tier)
            return None

    def _tell(self, tier: Tier) -> None:
        """Once a tier: one that is gone fails at every request."""
        if tier.name not in self._told:
            self._told.add(tier.name)
            logging.getLogger(__name__).warning("tier %s failed: a miss", tier.name, exc_info=True)
