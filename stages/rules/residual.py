"""Speculative sampling: a sampled draft is accepted with probability min(1, p / q).

Leviathan et al. (2211.17192) and Chen et al. (2302.01318). p is the target's law after penalties,
constraint, temperature and filters, q the law the draft was drawn from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.types import Proposal, RowSampler, Sequence, TokenLogprob
from stages.rules.match import Draw, Match

EMPTY = 1e-9  # mass of max(p - q, 0) below which p and q are the same law
ACCEPTING, CORRECTING = 0, 1  # which coin of a position


class Residual(Match):
    """Accepts more of sampled drafts than `match` without shared noise would; exact in law, not token
    for token: the answer depends on the drafter. A draft that was chosen, not drawn, is taken for
    certain (q is one there), and then the law of acceptance is that of `match`. On a rejection the
    token comes from max(p - q, 0). All chance is a function of (seed, position). Greedy rows: `match`.
    """

    can: frozenset[str] = frozenset()

    def _draws(self, sequence: Sequence, logits_LV: Any) -> Draw:
        sampler, proposal = sequence.sampler, sequence.proposal
        assert sampler is not None
        if sampler.greedy:
            return super()._draws(sequence, logits_LV)
        laws, start = _laws(sampler, proposal), sequence.position

        def draw(index: int) -> tuple[int, TokenLogprob | None]:
            if index == len(proposal):
                return sampler.draw(logits_LV[index], start + index)
            p_V = sampler.law(logits_LV[index])
            token = decided(p_V, laws[index], proposal[index], sampler, start + index)
            return token, sampler.logprob(logits_LV[index], token)

        return draw


def _laws(sampler: RowSampler, proposal: list[int]) -> list[Any]:
    """q_V of each draft, None where it was chosen. All before anything is emitted: the drafts were
    drawn with the sampler as it is now."""
    scores = proposal.scores if isinstance(proposal, Proposal) else []
    laws = [None if scores_V is None else sampler.law(scores_V) for scores_V in scores]
    return laws + [None] * (len(proposal) - len(laws))


def decided(p_V: Any, q_V: Any, draft: int, sampler: RowSampler, position: int) -> int:
    """The token at `position`: the draft, or another one from the residual law."""
    q = 1.0 if q_V is None else q_V[draft]
    if sampler.coin(position, ACCEPTING) * q < p_V[draft]:
        return draft
    if q_V is None:
        rest_V = p_V.copy()
        rest_V[draft] = 0.0
    else:
        rest_V = np.maximum(p_V - q_V, 0.0)
    sums_V = np.cumsum(rest_V if rest_V.sum() > EMPTY else p_V)
    at = sampler.coin(position, CORRECTING) * sums_V[-1]
    return int(np.searchsorted(sums_V, at, side="right"))
