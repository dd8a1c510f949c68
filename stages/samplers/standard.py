"""The one sampler every option of the group configures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from pipeline.errors import ConfigError, Problem, RequestError
from pipeline.types import Matcher, RowSampler, Sampling
from stages.constraints.none import Free
from stages.samplers.row import StandardRow

_RANGES = {  # low, high, whether low itself is allowed
    "temperature": (0.0, math.inf, True),
    "top_p": (0.0, 1.0, False),
    "top_k": (0, math.inf, True),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.01, 100.0, True),
    "presence_penalty": (-100.0, 100.0, True),
    "frequency_penalty": (-100.0, 100.0, True),
}


def faults(sampling: Sampling) -> list[tuple[str, str]]:
    """(field, what is wrong with it) for every number out of its range; NaN is out of any."""
    wrong = []
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(sampling, name)
        fits = value is None or (
            math.isfinite(value) and (low < value or (closed and value == low)) and value <= high
        )
        if not fits:
            bracket = "[" if closed else "("
            wrong.append((name, f"{value} is not in {bracket}{low}, {high}]"))
    wrong += [
        ("logit_bias", f"{bias} for token {token} is not within ±1e6 for a token id >= 0")
        for token, bias in sampling.logit_bias or ()
        if token < 0 or not abs(bias) <= 1e6
    ]
    if sampling.seed is not None and not 0 <= sampling.seed < 2**63:
        wrong.append(("seed", f"{sampling.seed} is not in [0, 2**63 - 1]"))
    return wrong


class Standard:
    """Temperature, nucleus and penalties with noise keyed by (seed, absolute position).

    Settings are the recipe's defaults; `None` leaves the choice to the model's generation_config.
    Temperature 0 is greedy. ConfigError for numbers out of range, in a request RequestError.
    """

    can: frozenset[str] = frozenset({"history", "logprobs", "seed"})

    def __init__(
        self,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
    ):
        bias = None if logit_bias is None else tuple((int(k), v) for k, v in logit_bias.items())
        self.defaults = Sampling(
            temperature, top_p, top_k, min_p,
            repetition_penalty, presence_penalty, frequency_penalty, bias, seed,
        )  # fmt: skip
        if wrong := faults(self.defaults):
            raise ConfigError([Problem(f"sampler.{name}", what) for name, what in wrong])

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def bind(
        self,
        sampling: Sampling,
        seed: int,
        prompt_ids: Seq[int],
        logprobs: int | None,
        matcher: Matcher | None = None,
    ) -> RowSampler:
        if wrong := faults(sampling):
            name, what = wrong[0]
            raise RequestError(f"{name}: {what}", param=name)
        return StandardRow(sampling, seed, prompt_ids, logprobs, matcher or Free())
