"""Rule residual under a constraint, with a drafter that draws: the law stays the target's.

Six tokens under a form in which an even token must be followed by an odd one; the target likes all
the same, the drafter often proposes even ones. Drafts are chosen by `choice`, which all drawing
drafters use, and cut by the draft stage where they are illegal.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from test_laws import V, chi_square_p

from pipeline.types import NEUTRAL, Batch, Proposal, Request, Sampling, Sequence
from stages.draft import Draft
from stages.drafters.choice import choice
from stages.rules.residual import Residual
from stages.samplers.standard import Standard

SAID = Sampling(temperature=1.0).over(NEUTRAL)
TOKENS, SAMPLES = 2, 100
TARGET = np.zeros((V, V), np.float32)
DRAFT = np.log(np.tile([0.2, 0.38, 0.2, 0.01, 0.2, 0.01], (V, 1))).astype(np.float32)
STAGE = Draft(SimpleNamespace(eos_ids=frozenset()), SimpleNamespace(), SimpleNamespace())


class Alternating:
    """After an even token only odd ones; after an odd one anything."""

    free, done = False, False

    def __init__(self):
        self.last = 1

    def allowed(self, last, token):
        return last % 2 == 1 or token % 2 == 1

    def mask(self, logits_V):
        legal = [self.allowed(self.last, token) for token in range(V)]
        return np.where(legal, logits_V, -np.inf).astype(np.float32)

    def push(self, token):
        assert self.allowed(self.last, token)
        self.last = token

    def legal(self, ids):
        last = self.last
        for at, token in enumerate(ids):
            if not self.allowed(last, token):
                return at
            last = token
        return len(ids)


def drawn_anywhere(scores_V, sampler, position, place):
    """What drafters must not do: draw after the first place too, from a mask of before it."""
    return sampler.draw(scores_V, position)[0], True


def sample(seed, how):
    sampler = Standard().bind(SAID, seed, [1], None, Alternating())
    row = Sequence(Request(id="r"), print, prompt_ids=[1], sampler=sampler)
    while len(row.output_ids) < TOKENS:
        last, found = (row.prompt_ids + row.output_ids)[-1], Proposal()
        for place in range(2):
            scores_V = DRAFT[found[-1] if found else last]
            token, drawn = how(scores_V, sampler, row.position + place, place)
            found.append(token)
            found.scores.append(scores_V if drawn else None)
        row.proposal = STAGE._possible(found, row)
        scores = np.stack([TARGET[last], *(TARGET[token] for token in row.proposal)])
        emitted, row.accepted = Residual().accept(row, scores, 3, frozenset())
        row.output_ids += [e.token_id for e in emitted]
    return tuple(row.output_ids[:TOKENS])


def exact():
    """Probability of each pair of first tokens."""
    law = np.zeros((V,) * TOKENS)
    for ids in np.ndindex(law.shape):
        sampler, chance, last = Standard().bind(SAID, 0, [1], None, Alternating()), 1.0, 1
        for token in ids:
            chance *= sampler.law(TARGET[last])[token]
            if not chance:
                break
            sampler.push(token)
            last = token
        law[ids] = chance
    return law.ravel()


def counted(base, how):
    counts = np.zeros((V,) * TOKENS)
    for index in range(SAMPLES):
        counts[sample(base * 1_000_003 + index, how)] += 1
    return counts.ravel()


def test_the_law_is_the_targets_under_a_form():
    law = exact()
    assert law.sum() == pytest.approx(1.0)
    counts = [counted(base, choice) for base in range(20)]
    values = [chi_square_p(some, law) for some in [*counts, sum(counts)]]
    assert min(values) > 0.001, values


def test_the_test_would_see_drafts_that_are_drawn_past_the_first_place():
    counts = sum(counted(base, drawn_anywhere) for base in range(20))
    assert chi_square_p(counts, exact()) < 1e-4


def test_a_drafter_that_knows_no_legal_token_chooses():
    """Its choice is illegal and will be cut; nothing is drawn from scores that are all -inf."""
    sampler = Standard().bind(SAID, 3, [0], None, Alternating())
    sampler.push(2)
    scores_V = np.array([1.0, -np.inf, 2.0, -np.inf, 0.0, -np.inf], np.float32)
    assert choice(scores_V, sampler, 1, 0) == (2, False)
    assert choice(np.zeros(V, np.float32), sampler, 1, 0)[1]
    assert not choice(np.zeros(V, np.float32), sampler, 2, 1)[1]


class LongOnly:
    """A depth that finds one draft not worth verifying."""

    def choose(self, batch):
        return [2]

    def cut(self, batch, proposals):
        return [len(ids) if len(ids) > 1 else 0 for ids in proposals]


def drawing(scores_V, samplers, positions):
    """What draft rows give that draw two tokens from the same scores."""
    found = Proposal()
    for place in range(2):
        token, _ = choice(scores_V, samplers[0], positions[0] + place, place)
        found.append(token)
        found.scores.append(scores_V)
    return [found]


def test_what_is_verified_does_not_depend_on_the_tokens_drawn():
    """EOS (0) as the first draft ends the proposal; its length must not decide about it."""
    p_V, q_V = np.log(np.float32([0.2, 0.7, 0.1])), np.log(np.float32([0.4, 0.1, 0.5]))
    stage = Draft(SimpleNamespace(eos_ids={0}), SimpleNamespace(can=frozenset()), LongOnly())
    counts = np.zeros(3)
    for seed in range(5000):
        sampler = Standard().bind(SAID, seed, [1], None, None)
        row = Sequence(Request(id="r"), print, prompt_ids=[1], sampler=sampler, max_new=9)
        drawn = lambda *asked, at=row.position: drawing(q_V, asked[2], [at])  # noqa: E731
        rows = SimpleNamespace(assign=lambda owners: None, draft=drawn)
        stage.run(Batch([row], None, rows))
        scores = np.tile(p_V, (1 + len(row.proposal), 1))
        emitted, _ = Residual().accept(row, scores, 1, {0})
        counts[emitted[0].token_id] += 1
    assert chi_square_p(counts, np.array([0.2, 0.7, 0.1])) > 0.001, counts
