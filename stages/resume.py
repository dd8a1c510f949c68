"""Go on with an answer that a crash or a disconnect has cut off."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pipeline.types import (
    Attachment,
    Attempt,
    Attempts,
    Batch,
    Emitted,
    Fetch,
    Match,
    Sampler,
    Sequence,
    Target,
    Tier,
)
from stages.detokenize import Detokenize
from stages.progress import Logprobs, Progress, emitted_by, key_of


class Finding:
    """A look through what earlier attempts left (protocol Fetch)."""

    def __init__(self, left: Iterator[tuple[Attempt, Fetch]]):
        self.left = left
        self.attempt: Attempt | None = None
        self.reading: Fetch | None = None
        self.turn()

    def turn(self) -> None:
        """To the next; `attempt` is None behind the last."""
        self.attempt, self.reading = next(self.left, (None, None))

    def done(self) -> bool:
        return self.reading is None or self.reading.done()

    def take(self) -> Match | None:
        """The state with its record; None where one of them could not be read just now."""
        match = None if self.reading is None else self.reading.take()
        if match is None or self.attempt is None:
            return None
        if any(note.namespace == self.attempt.label for note in match.state.attachments):
            return match
        match.release()
        return None

    def release(self) -> None:
        if self.reading is not None:
            self.reading.release()


class Resume:
    """The same request sent again starts where its last capture is: with the tokens emitted so far,
    which are delivered again, their log-probabilities, the seed, and the place in the constraint.

    What cannot be gone on from is removed, and the answer begins at its beginning. Who wants the
    prompt's own log-probabilities has to run all of it, so nothing is kept for it.
    """

    reads = frozenset(
        {"request", "prompt_ids", "namespace", "sampling", "seed", "max_new", "sampler", "match",
         "cached_len", "output_ids", "text_state", "restore"}
    )  # fmt: skip
    writes = frozenset(
        {"progress", "match", "cached_len", "output_ids", "seed", "sampler", "text_state",
         "resumed_len", "restore"}
    )  # fmt: skip
    needs = {"tier": frozenset({"resume"})}
    thread = "owner"

    def __init__(self, target: Target, sampler: Sampler, tier: list[Tier]):
        self.sampler, self.tiers = sampler, tier
        self.text = Detokenize(target)

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            if sequence.progress is None and sequence.request.prompt_logprobs is None:
                self._look(sequence, attempts_of(self.tiers))

    def _look(self, sequence: Sequence, attempts: Attempts) -> None:
        key, search = key_of(sequence), sequence.restore
        try:
            if not isinstance(search, Finding):
                fresh = not sequence.output_ids
                where = key, sequence.prompt_ids, sequence.namespace
                search = Finding(attempts.left(*where) if fresh else iter(()))
            sequence.restore = None if self._find(sequence, attempts, search) else search
        except Exception as error:  # a disk that fails costs the start, not the answer
            logging.getLogger(__name__).warning("nothing is resumed: %r", error)
            sequence.restore = None
        if sequence.progress is None and sequence.restore is None:
            sequence.progress = Progress(attempts.begin(key))

    def _find(self, sequence: Sequence, attempts: Attempts, search: Finding) -> bool:
        """False while something has to be read first. What cannot be read just now stays."""
        while search.attempt is not None:
            if not search.done():
                return False
            match = search.take()
            if match is not None and self._of_another(sequence, search.attempt, match):
                match.release()
                search.turn()
                continue
            if match is not None and self._go_on(sequence, search.attempt, match):
                return True
            if match is not None:
                match.release()
                attempts.end(search.attempt)
            search.turn()
        return True

    def _of_another(self, sequence: Sequence, attempt: Attempt, match: Match) -> bool:
        """Whether it is the answer of an equal request for which another seed was drawn."""
        drawn = sequence.request.drawn_seed
        record = next(n for n in match.state.attachments if n.namespace == attempt.label)
        return drawn is not None and record.metadata.get("seed") != drawn

    def _go_on(self, sequence: Sequence, attempt: Attempt, match: Match) -> bool:
        """False where the record cannot be used; the sequence is then as it was."""
        before = sequence.seed, sequence.sampler
        record = next(n for n in match.state.attachments if n.namespace == attempt.label)
        try:
            emitted = emitted_by(record, match.state.tokens, sequence)
            self._replay(sequence, record, emitted)
        except Exception as error:  # whatever a record of another version may hold
            logging.getLogger(__name__).warning("a capture cannot be resumed: %r", error)
            sequence.seed, sequence.sampler = before
            sequence.output_ids, sequence.text_state = [], None
            if sequence.sampler is not None:
                sequence.sampler.restart(())  # its matcher has seen the record's tokens
            return False
        count = len(emitted)
        sequence.progress = Progress(attempt, Logprobs(record.tensors), count, count)
        sequence.match, sequence.cached_len = match, len(sequence.prompt_ids)
        sequence.resumed_len = count
        return True

    def _replay(self, sequence: Sequence, record: Attachment, emitted: list[Emitted]) -> None:
        """Deliver again, once it is certain that this is the answer's beginning."""
        assert sequence.sampler is not None
        request, matcher = sequence.request, sequence.sampler.matcher
        sequence.seed = int(record.metadata["seed"])
        sequence.sampler = self.sampler.bind(
            sequence.sampling, sequence.seed, sequence.prompt_ids, request.logprobs, matcher
        )
        sequence.sampler.restart([each.token_id for each in emitted])
        delivery = self.text.read(sequence, emitted)
        if delivery.finish:
            raise ValueError(f"an answer under way that has ended by '{delivery.finish}'")
        delivery.send(sequence)


def attempts_of(tiers: list[Tier]) -> Attempts:
    """Where answers under way are kept."""
    return next(tier.attempts for tier in tiers if "resume" in tier.can)
