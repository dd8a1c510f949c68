"""Find the longest saved state a request can start from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from pipeline.types import Batch, Fetch, Match, Sequence, Tier

ATTEMPTS = 4  # a tier whose states turn out to be bad is asked again, but not for ever

T = TypeVar("T")


class Search:
    """One request's look-up over all tiers (protocol Fetch). The tier that promises most is asked; if it
    gives less, whoever promises most then; the last time, less is taken too."""

    def __init__(
        self, tiers: list[Tier], known: list[int], namespace: str, tell: Callable[[Tier], None]
    ):
        self.tiers, self.tell = tiers, tell
        self.what = known, namespace, len(known) - 1
        self.most, self.left = 0, ATTEMPTS
        self.tier: Tier | None = None
        self.reading: Fetch | None = None
        self.found: Match | None = None

    def done(self) -> bool:
        return self.reading is None or self.reading.done()

    def recall(self, session: str | None) -> None:
        """A session's last state needs no search."""
        for tier in self.tiers:
            if session is None:
                return
            if self.found is None and "sessions" in tier.can:
                self.found = self._safely(tier, partial(tier.recall, session, *self.what))

    def agreed(self, tokens: list[int]) -> int:
        """How many leading tokens some saved state has, whether or not it can be cut there."""
        _, namespace, _ = self.what
        held = (self._safely(t, partial(t.covered, tokens, namespace)) or 0 for t in self.tiers)
        return max(held, default=0)

    def step(self) -> bool:
        """Go on until it is over (True), with what was `found`, or something has to be read first."""
        while self.found is None:
            if self.reading is not None:
                if not self.reading.done():
                    return False
                self.found, self.reading = self._judge(self.reading.take), None
            elif not self._ask():
                break
        return True

    def take(self) -> Match | None:
        return self.found

    def release(self) -> None:
        if self.reading is not None:
            self.reading.release()

    def _ask(self) -> bool:
        """Ask the tier that promises most; False if none promises anything, which is a miss of all."""
        promised = [self._promise(tier) for tier in self.tiers]
        self.most, self.left = max(promised, default=0), self.left - 1
        if self.left < 0:
            return False
        for tier in self.tiers if not self.most else [self.tiers[promised.index(self.most)]]:
            self._begin(tier)
        return self.most > 0 or self.reading is not None

    def _promise(self, tier: Tier) -> int:
        return self._safely(tier, partial(tier.usable, *self.what)) or 0

    def _begin(self, tier: Tier) -> None:
        self.tier = tier
        if "fetch" in tier.can:
            self.reading = self._safely(tier, partial(tier.fetch, *self.what))
        else:
            self.found = self._judge(partial(tier.lookup, *self.what))

    def _judge(self, give: Callable[[], Match | None]) -> Match | None:
        """What the tier gives, if it is what it promised."""
        assert self.tier is not None
        match = self._safely(self.tier, give)
        if match is None or len(match.state.tokens) >= self.most or not self.left:
            return match
        match.release()
        return None

    def _safely(self, tier: Tier, ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except Exception:
            self.tell(tier)
            return None


class PrefixLookup:
    """The longest usable prefix over all tiers wins, ties go to the earlier (faster) one; only the
    winner is read, while the row waits and others go on. A session whose last state is a prefix goes
    on from it without a search.

    At least the last token is left to be run. A tier that fails is a miss. Who wants the prompt's own
    log-probabilities has to run all of it.
    """

    reads = frozenset(
        {"request", "prompt_ids", "output_ids", "namespace", "processed_ids", "restore"}
    )
    writes = frozenset({"match", "cached_len", "agreed_len", "restore"})
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
        search = sequence.restore
        if search is not None and not isinstance(search, Search):
            return  # another stage waits for what it reads
        if search is None:
            known = sequence.prompt_ids + sequence.output_ids
            search = Search(self.tiers, known, sequence.namespace, self._tell)
            search.recall(sequence.request.session_id)
            sequence.agreed_len = search.agreed(sequence.prompt_ids)
        sequence.restore = None if search.step() else search
        sequence.match = search.take()
        if sequence.match is not None and "suspect" not in sequence.counts:
            sequence.cached_len = len(sequence.match.state.tokens)

    def _tell(self, tier: Tier) -> None:
        """Once a tier: one that is gone fails at every request."""
        if tier.name not in self._told:
            self._told.add(tier.name)
            logging.getLogger(__name__).warning("tier %s failed: a miss", tier.name, exc_info=True)
