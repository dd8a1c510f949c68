"""Accept a drafted token exactly when it is the token the target itself draws there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from pipeline.types import Emitted, Origin, Sequence, TokenLogprob

Draw = Callable[[int], tuple[int, TokenLogprob | None]]


class Match:
    """Every emitted token is the target's own sample, so the law is exact for any proposal and the
    tokens are those of plain decoding. The first difference emits the target's token (the
    correction); a window agreed to throughout emits one more (the bonus)."""

    can: frozenset[str] = frozenset({"token_exact"})

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def accept(
        self, sequence: Sequence, logits_LV: Any, limit: int, eos_ids: Collection[int]
    ) -> tuple[list[Emitted], int]:
        sampler, proposal = sequence.sampler, sequence.proposal
        assert sampler is not None, "tokenize binds a sampler before anything is scored"
        draw = self._draws(sequence, logits_LV)
        emitted: list[Emitted] = []
        accepted = 0
        for index in range(min(limit, 1 + len(proposal))):
            token, logprob = draw(index)
            agreed = index < len(proposal) and token == proposal[index]
            origin = _origin(sequence, index, logits_LV[index], agreed)
            sampler.push(token)
            emitted.append(Emitted(token, logprob, origin))
            accepted += agreed
            if not agreed or token in eos_ids or sampler.matcher.done:
                break
        return emitted, accepted

    def _draws(self, sequence: Sequence, logits_LV: Any) -> Draw:
        """The target's token at each index of the window, drawn only when asked for."""
        sampler, start = sequence.sampler, sequence.position
        assert sampler is not None
        if not sampler.greedy:
            return lambda index: sampler.draw(logits_LV[index], start + index)
        best_L = np.argmax(logits_LV, axis=-1)
        return lambda index: (_finite(logits_LV[index], int(best_L[index])), None)


def _origin(sequence: Sequence, index: int, logits_V: Any, agreed: bool) -> Origin | None:
    """Of the token at `index` of the window, before it is pushed; None where nobody asks."""
    if not sequence.request.origins:
        return None
    assert sequence.sampler is not None
    overruled, proposal = sequence.sampler.overruled(logits_V), sequence.proposal
    if agreed:
        return Origin("accepted", overruled)
    if index < len(proposal):
        return Origin("correction", overruled, tuple(proposal[index:]))
    return Origin("bonus" if proposal else "plain", overruled)


def _finite(logits_V: Any, token: int) -> int:
    """`token`, the argmax, unless its score says that nothing can be chosen (NaN wins any argmax)."""
    if not np.isfinite(logits_V[token]):
        raise FloatingPointError(f"the target's scores are not finite ({logits_V[token]})")
    return token
