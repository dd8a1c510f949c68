"""One request's sampler: from a row of scores to a token, and what it cost in log-probability."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.types import Matcher, Sampling, TokenLogprob
from stages.samplers.filters import highest, inverse_temperature, survivors
from stages.samplers.noise import gumbel, uniform
from stages.samplers.penalties import Penalties

if TYPE_CHECKING:
    import numpy.typing as npt

    from stages.samplers.filters import Floats, Ids

COINS = 0x5DEECE66D  # another stream of noise than that of the draws


def finite_peak(logits_V: Floats) -> float:
    """The highest score. FloatingPointError where it is NaN (as any NaN makes it) or infinite:
    nothing can be chosen from such scores, and the fault is the model's or ours."""
    peak = float(logits_V.max())
    if not math.isfinite(peak):
        raise FloatingPointError(f"the target's scores are not finite (highest: {peak})")
    return peak


def token_logprob(logits_V: Floats, token_id: int, count: int) -> TokenLogprob:
    """log-softmax at `token_id` and at the `count` highest scores, best first, ties by id."""
    peak = float(logits_V.max())
    mass = float(np.exp(logits_V - np.float32(peak)).sum(dtype=np.float64))
    floor = peak + math.log(mass)
    best = highest(logits_V, count) if count else np.arange(0)
    ordered = best[np.argsort(-logits_V[best], kind="stable")]
    top = tuple((int(i), float(logits_V[i]) - floor) for i in ordered)
    return TokenLogprob(token_id, float(logits_V[token_id]) - floor, top)


class StandardRow:
    """Order: logit_bias, penalties, (log-probabilities are read here), constraint, temperature, top_k,
    top_p, min_p, then the highest of score + Gumbel noise. Temperature 0: the highest score, lowest
    id."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt_ids: Iterable[int],
        logprobs: int | None,
        matcher: Matcher,
    ):
        self.matcher = matcher
        self._temperature = sampling.temperature or 0.0
        self._top_k = sampling.top_k or 0
        self._top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self._min_p = sampling.min_p or 0.0
        self._seed = seed
        self._logprobs = logprobs
        self._penalties = Penalties(sampling, prompt_ids)
        plain = self._temperature == 0 and logprobs is None
        self.greedy = plain and self._penalties.neutral and matcher.free

    def draw(self, logits_V: Any, position: int) -> tuple[int, TokenLogprob | None]:
        logits = self._penalized(logits_V)
        legal = self.matcher.mask(logits)
        token = self._sample(legal, position) if self._temperature else int(legal.argmax())
        if self._logprobs is None:
            return token, None
        return token, token_logprob(logits, token, self._logprobs)

    def _penalized(self, logits_V: Any) -> Floats:
        logits = self._penalties.apply(np.asarray(logits_V, dtype=np.float32))
        finite_peak(logits)
        return logits

    def _sample(self, logits: Floats, position: int) -> int:
        ids, scores = self._candidates(logits)
        return int(ids[np.argmax(scores + gumbel(self._seed, position, ids))])

    def _candidates(self, logits: Floats) -> tuple[Ids, Floats]:
        """Ids that may be drawn, and their log-probabilities but for a constant."""
        scale = inverse_temperature(self._temperature)
        with np.errstate(over="ignore"):  # a tiny temperature sends scores to -inf, as it should
            ids = survivors(logits, scale, self._top_k, self._top_p, self._min_p)
            return ids, (logits[ids] - logits.max()) * scale

    def law(self, logits_V: Any) -> npt.NDArray[np.float64]:
        legal = self.matcher.mask(self._penalized(logits_V))
        law_V = np.zeros(len(legal), np.float64)
        if not self._temperature:
            law_V[legal.argmax()] = 1.0
            return law_V
        ids, scores = self._candidates(legal)
        weights = np.exp(scores, dtype=np.float64)
        law_V[ids] = weights / weights.sum()
        return law_V

    def coin(self, position: int, turn: int) -> float:
        return float(uniform(self._seed ^ COINS, position, np.array([turn], np.int64))[0])

    def logprob(self, logits_V: Any, token_id: int) -> TokenLogprob | None:
        if self._logprobs is None:
            return None
        return token_logprob(self._penalized(logits_V), token_id, self._logprobs)

    def overruled(self, logits_V: Any) -> bool:
        if self.matcher.free:
            return False
        logits = self._penalized(logits_V)
        best = int(logits.argmax())
        return bool(self.matcher.mask(logits)[best] != logits[best])

    def push(self, token_id: int) -> None:
        self._penalties.push(token_id)
        self.matcher.push(token_id)

    def restart(self, output_ids: Seq[int]) -> None:
        self._penalties.restart(output_ids)
        self.matcher.restart(output_ids)
