"""As many drafts as the drafter is sure of, its word corrected by how often it was right."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.errors import below, outside, refuse
from pipeline.types import Batch, Proposal
from stages.depth.fixed import room

BINS = 10  # of confidence, at each place of a proposal
PRIOR = 4.0  # rounds that the drafter's own word counts for
FADE = 0.995  # a verified draft's weight after the next one in its bin


class Confidence:
    """Up to `max` drafts, cut before the first that is less likely right than `min_p`.

    The drafter says how sure it is of each place. What that is worth is learned: by place and tenth of
    confidence, the share of verified drafts that were accepted, beginning with the drafter's word. So
    a drafter that boasts is cut shorter. The cut looks at places, never at the ids drawn there.
    """

    can: frozenset[str] = frozenset()
    needs = {"drafter": frozenset({"grade"})}  # to say how sure it is of each draft

    def __init__(self, *, max: int = 8, min_p: float = 0.5):
        refuse(max=below(max, 0), min_p=outside(min_p, 0, 1))
        self.max, self._min_p = max, min_p
        self.open()

    def open(self) -> None:
        self._right: dict[
            tuple[int, int], tuple[float, float]
        ] = {}  # (place, bin) -> (right, seen)

    def close(self) -> None:
        pass

    def choose(self, batch: Batch) -> list[int]:
        return [room(sequence, self.max) for sequence in batch.sequences]

    def cut(self, batch: Batch, proposals: Seq[Seq[int]]) -> list[int]:
        return [self._sure(proposal) for proposal in proposals]

    def _sure(self, proposal: Seq[int]) -> int:
        said = proposal.confidence if isinstance(proposal, Proposal) else []
        for place, confidence in enumerate(said):
            if self.likely(place, confidence) < self._min_p:
                return place
        return len(proposal)

    def likely(self, place: int, confidence: float) -> float:
        """How often a draft at `place` (from 0) of such confidence is accepted, given those before."""
        right, seen = self._right.get((place, _bin(confidence)), (0.0, 0.0))
        return (right + PRIOR * confidence) / (seen + PRIOR)

    def observe(self, batch: Batch, seconds: float) -> None:
        for sequence in batch.sequences:
            if sequence.finish_reason is None:
                judged = sequence.proposal.confidence[: sequence.accepted + 1]
                for place, confidence in enumerate(judged):
                    self._note((place, _bin(confidence)), place < sequence.accepted)

    def _note(self, key: tuple[int, int], accepted: bool) -> None:
        right, seen = self._right.get(key, (0.0, 0.0))
        self._right[key] = (right * FADE + accepted, seen * FADE + 1)


def _bin(confidence: float) -> int:
    return min(BINS - 1, int(confidence * BINS))
