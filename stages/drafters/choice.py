"""How a row chooses a draft from scores."""

from __future__ import annotations

from typing import Any

import numpy as np


def choice(scores_V: Any, sampler: Any, position: int, place: int) -> tuple[int, bool]:
    """The draft at `place` of a proposal, and whether it was drawn from these host scores rather than
    chosen. Drawn: by the row's own sampler with the noise of its absolute `position`, which is the
    noise that the target's own draw will have there.

    Greedy rows choose the best. So do rows under a constraint after the first place: their matcher
    stands before it and cannot mask what follows, and a draw that is dropped for being illegal would
    bend the law of those that are left (rule `residual`). What was chosen counts as certain. Nor can
    anything be drawn where a drafter of few tokens knows none of the legal ones.
    """
    if sampler is None or sampler.greedy or not _drawable(scores_V, sampler.matcher, place):
        return int(scores_V.argmax()), False
    return int(sampler.draw(scores_V, position)[0]), True


def _drawable(scores_V: Any, matcher: Any, place: int) -> bool:
    if matcher.free:
        return True
    unknown = np.isneginf(scores_V).any()  # ids that the drafter has no scores for
    return not place and not (unknown and np.isneginf(matcher.mask(scores_V)).all())
