"""From samples to a verdict: medians of pairs, their intervals, and whether a promise is kept."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

LEVEL = 0.90
RESAMPLES = 2000
FEWEST = 5  # samples: below, an interval says nothing of 90 %


@dataclass(frozen=True)
class Promise:
    """A bound on a figure: `at least` or `at most`."""

    sense: Literal[">=", "<="]
    bound: float

    def kept(self, value: float) -> bool:
        return value >= self.bound if self.sense == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.sense} {self.bound:g}"


@dataclass(frozen=True)
class Figure:
    """One line of the table. `interval` only where it is a ratio; `note` says what was seen."""

    name: str
    title: str
    value: float
    promise: Promise
    unit: str = ""
    interval: tuple[float, float] | None = None
    samples: Sequence[float] = ()
    note: str = ""
    holds: bool = True  # side conditions: equal tokens, nothing heavy imported
    details: dict[str, object] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """A ratio meets its promise if its interval reaches it."""
        return self.holds and any(map(self.promise.kept, (self.value, *(self.interval or ()))))


def median_interval(
    samples: Sequence[float], level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Percentile bootstrap of the median (Efron, 1979), the same for the same samples; none of fewer
    than `FEWEST`."""
    if len(samples) < FEWEST:
        return None
    draw = random.Random(0).choices
    medians = sorted(
        statistics.median(draw(samples, k=len(samples))) for _ in range(max(1, resamples))
    )
    tail = (1 - level) / 2
    return medians[int(tail * len(medians))], medians[int((1 - tail) * len(medians)) - 1]


def ratio(
    name: str,
    title: str,
    pairs: Sequence[tuple[float, float]],
    promise: Promise,
    *,
    note: str = "",
    holds: bool = True,
) -> Figure:
    """The median over pairs (ours, theirs) of ours / theirs."""
    ratios = [ours / theirs for ours, theirs in pairs]
    return Figure(
        name,
        title,
        statistics.median(ratios),
        promise,
        interval=median_interval(ratios),
        samples=ratios,
        note=note,
        holds=holds,
        details={"pairs": [list(pair) for pair in pairs]},
    )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The least-squares rise of y with x."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope
