"""Rules against the target's law: what is emitted with drafts is distributed as without.

A chain of six tokens whose next one depends on the last; the drafter's chain is another. Two rounds or
more a sample, so that noise which a lost draft has used is used again. Chi-square of the first two
tokens, 20 fixed seeds a case and all together, each above p = 0.001.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from pipeline.types import NEUTRAL, Batch, Proposal, Request, Sampling, Sequence
from stages.depth.confidence import Confidence
from stages.rules.match import Match
from stages.rules.residual import Residual
from stages.samplers.standard import Standard

V, TOKENS, SAMPLES = 6, 2, 150
DRAW = np.random.default_rng(11)
TARGET = DRAW.normal(size=(V, V)).astype(np.float32) * 1.2
DRAFT = (TARGET + DRAW.normal(size=(V, V)) * 1.0).astype(np.float32)
CASES = {
    "sampled": ({"temperature": 1.0}, "drawn", False),
    "top_p": ({"temperature": 0.9, "top_p": 0.8}, "drawn", False),
    "top_k": ({"temperature": 1.3, "top_k": 4}, "drawn", False),
    "one-hot": ({"temperature": 1.0}, "chosen", False),
    "threshold": ({"temperature": 1.0}, "drawn", True),
    "threshold, one-hot": ({"temperature": 1.0, "top_p": 0.9}, "chosen", True),
}


def sampler_of(said, seed):
    return Standard().bind(Sampling(**said).over(NEUTRAL), seed, [0], None)


def proposal(sampler, last, position, how):
    """Two drafts of the chain DRAFT, drawn with the row's own noise or chosen."""
    found = Proposal()
    for index in range(2):
        scores = DRAFT[last]
        weights = np.exp(scores - scores.max())
        found.confidence.append(float(weights.max() / weights.sum()))
        last = (
            int(scores.argmax()) if how == "chosen" else sampler.draw(scores, position + index)[0]
        )
        found.append(last)
        found.scores.append(None if how == "chosen" else scores)
    return found


def sample(rule, said, seed, how, depth):
    sampler = sampler_of(said, seed)
    row = Sequence(Request(id="r"), print, prompt_ids=[0], sampler=sampler)
    while len(row.output_ids) < TOKENS:
        last = (row.prompt_ids + row.output_ids)[-1]
        drafts = proposal(sampler, last, row.position, how)
        row.proposal = drafts.cut(depth.cut(Batch([row], None, None), [drafts])[0] if depth else 2)
        scores = np.stack([TARGET[last], *(TARGET[token] for token in row.proposal)])
        emitted, row.accepted = rule.accept(row, scores, 3, frozenset())
        row.output_ids += [e.token_id for e in emitted]
    return tuple(row.output_ids[:TOKENS])


def exact(said):
    """Probability of each pair of first tokens."""
    law = sampler_of(said, 0).law
    first = law(TARGET[0])
    return np.stack([first[a] * law(TARGET[a]) for a in range(V)]).ravel()


def chi_square_p(counts, law):
    """Upper tail, by Wilson and Hilferty's cube root. Cells expected below 5 are put together."""
    expected = law * counts.sum()
    assert counts[law == 0].sum() == 0
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    from math import erfc

    return 0.5 * erfc(z / 2**0.5)


def counted(rule, case, base, samples=SAMPLES):
    said, how, cuts = CASES[case]
    depth = Confidence(min_p=0.45) if cuts else None
    counts = np.zeros(V * V)
    for index in range(samples):
        first, second = sample(rule, said, base * 1_000_003 + index, how, depth)
        counts[first * V + second] += 1
    return counts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", [Residual, Match])
def test_the_law_is_the_targets(rule, case):
    law = exact(CASES[case][0])
    counts = [counted(rule(), case, base) for base in range(20)]
    values = [chi_square_p(some, law) for some in [*counts, sum(counts)]]
    assert min(values) > 0.001, values


def test_the_test_would_see_a_wrong_rule():
    class Careless(Residual):  # as if the drafts had been drawn evenly
        def accept(self, sequence, *more):
            even = [np.zeros(V, np.float32)] * len(sequence.proposal)
            sequence.proposal = Proposal(sequence.proposal, scores=even)
            return super().accept(sequence, *more)

    law = exact(CASES["sampled"][0])
    assert chi_square_p(sum(counted(Careless(), "sampled", base) for base in range(10)), law) < 1e-6


def test_residual_accepts_one_minus_the_distance_of_the_laws():
    said, hits = {"temperature": 1.0}, 0
    for seed in range(1500):
        sampler = sampler_of(said, seed)
        drafts = proposal(sampler, 0, 1, "drawn").cut(1)
        row = Sequence(Request(id="r"), print, prompt_ids=[0], sampler=sampler, proposal=drafts)
        hits += Residual().accept(row, TARGET[[0, drafts[0]]], 2, frozenset())[1]
    p, q = (sampler_of(said, 0).law(table[0]) for table in (TARGET, DRAFT))
    assert hits / 1500 == pytest.approx(np.minimum(p, q).sum(), abs=0.04)


def test_the_same_seed_gives_the_same_tokens():
    said, how, _ = CASES["sampled"]
    for seed in range(20):
        once, again = (sample(Residual(), said, seed, how, None) for _ in range(2))
        assert once == again


def test_coins_are_fair_and_no_draws_noise():
    sampler = sampler_of({"temperature": 1.0}, 3)
    flips = np.array(
        [[sampler.coin(position, turn) for turn in (0, 1)] for position in range(2000)]
    )
    assert abs(flips.mean(axis=0) - 0.5).max() < 0.03
    assert abs(np.corrcoef(flips.T)[0, 1]) < 0.07
    law = sampler.law(TARGET[0])
    assert law.sum() == pytest.approx(1.0)
    draws = np.bincount([sampler.draw(TARGET[0], p)[0] for p in range(3000)], minlength=V) / 3000
    assert abs(draws - law).max() < 0.03
    low = [
        f for f, p in zip(flips[:, 0], count(), strict=False) if sampler.draw(TARGET[0], p)[0] == 1
    ]
    assert abs(np.mean(low) - 0.5) < 0.05


def test_confidence_is_what_it_turns_out_to_be_worth():
    depth, row = Confidence(min_p=0.5), Sequence(Request(id="r"), print)
    boast = Proposal([1, 2, 3], [0.95, 0.9, 0.3])
    assert depth.cut(Batch([row], None, None), [boast, Proposal([1, 2])]) == [2, 2]
    for _ in range(30):
        row.proposal, row.accepted = boast.cut(2), 1
        depth.observe(Batch([row], None, None), 0.1)
    assert depth.likely(0, 0.95) > 0.9 > 0.2 > depth.likely(1, 0.9)
    assert depth.likely(1, 0.75) == 0.75  # another tenth: the drafter's word
    assert depth.cut(Batch([row], None, None), [boast]) == [1]
