"""Ask the drafter what may come next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from pipeline.types import Batch, Depth, Drafter, Proposal, Sequence, Target


class Draft:
    """Each live row gets a proposal of 0..depth tokens to follow its pending one.

    A proposal ends before the first token that the row's constraint forbids, and at its first EOS:
    nothing after them could be delivered; and where `depth` cuts it, once its length and the
    drafter's confidence are known. Of drafts that were drawn that is the length before EOS and
    constraint have shortened it: whether they are verified must not depend on what was drawn. A row
    that wears adapters gets one only from a drafter that can follow "adapters": what others have
    learned is the base model. What goes wrong in the drafter is settled by the rows' guard, what goes
    wrong in a row's constraint costs that row its proposal, and what goes wrong in the depth this
    round's speculation and nothing else: all proposals are empty and all depths 0.
    """

    reads = frozenset({"pending", "sampler", "output_ids", "max_new", "request", "owner"})
    writes = frozenset({"depth", "proposal"})
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, target: Target, drafter: Drafter, depth: Depth):
        self._target, self._drafter, self._depth = target, drafter, depth

    def run(self, batch: Batch) -> None:
        depths = self._depths(batch)
        proposals = [Proposal() for _ in depths]
        try:
            if any(depths):
                proposals = self._propose(batch, depths)
        except Exception:
            logging.getLogger(__name__).warning(
                "the proposals of %s cannot be used; this round runs without them",
                self._drafter.namespace,
                exc_info=True,
            )
            depths = [0] * len(depths)
        for sequence, depth, proposal in zip(batch.sequences, depths, proposals, strict=True):
            sequence.depth, sequence.proposal = depth, proposal

    def _depths(self, batch: Batch) -> list[int]:
        follows = "adapters" in self._drafter.can
        asked = zip(self._depth.choose(batch), batch.sequences, strict=True)
        return [depth if follows or not sequence.owner.adapted else 0 for depth, sequence in asked]

    def _propose(self, batch: Batch, depths: list[int]) -> list[Proposal]:
        rows = batch.sequences
        batch.draft_rows.assign([s.owner for s in rows])
        asked = [s.pending for s in rows], depths, [s.sampler for s in rows]
        found = batch.draft_rows.draft(*asked)
        made = [ids if isinstance(ids, Proposal) else Proposal(ids) for ids in found]
        pairs = [self._usable(*pair) for pair in zip(made, rows, strict=True)]
        lengths = self._depth.cut(batch, [judged for _, judged in pairs])
        return [ids.cut(length) for (ids, _), length in zip(pairs, lengths, strict=True)]

    def _usable(self, whole: Proposal, sequence: Sequence) -> tuple[Proposal, Proposal]:
        """What may be verified of it, and what decides how much is. A constraint that cannot tell
        costs its own row this round's proposal."""
        try:
            possible = self._possible(whole, sequence)
        except Exception:
            logging.getLogger(__name__).warning(
                "a proposal for %s cannot be used", sequence.request.id, exc_info=True
            )
            return Proposal(), Proposal()
        return possible, whole if whole.drawn else possible

    def _possible(self, proposal: Proposal, sequence: Sequence) -> Proposal:
        assert sequence.sampler is not None, "tokenize binds a sampler before anything is drafted"
        ends = () if sequence.request.ignore_eos else self._target.eos_ids
        proposal = up_to_eos(proposal, ends)
        return proposal.cut(sequence.sampler.matcher.legal(proposal))


def up_to_eos(proposal: Proposal, eos_ids: Collection[int]) -> Proposal:
    """The proposal up to and including its first EOS."""
    for index, token in enumerate(proposal):
        if token in eos_ids:
            return proposal.cut(index + 1)
    return proposal
