"""Knob after knob: each is tried with what was chosen before, and the best that is better is kept.

Not every combination is measured (that is what `headrace sweep` is for); the order is from what changes
most to what changes least. Points are kept in a folder, so that a search that was broken off goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.catalog import find_recipe
from pipeline.compose import compose
from pipeline.errors import HeadraceError
from pipeline.lab.experiment import Experiment, Point
from pipeline.lab.runners import Runner
from pipeline.lab.sweep import Row, Tell, measure, owned
from pipeline.lab.tune.goals import KNOBS, Goal, Knob, Verdict, judge, refusal

METRICS = ("seconds", "tokens_per_s", "ttft_ms", "kv_bytes_per_token", "peak_mb")


@dataclass(frozen=True)
class Step:
    """What came of one knob. `chosen` is empty where nothing was better; `left` says why not tried."""

    knob: Knob
    metric: str
    verdicts: tuple[Verdict, ...] = ()
    chosen: str = ""
    left: str = ""


@dataclass(frozen=True)
class Wanted:
    """What is tuned: a recipe as it is typed, for a goal, above a floor (top-1 agreement with native)."""

    recipe: str
    overrides: tuple[str, ...]
    goal: Goal
    floor: float
    repeats: int
    quality_tokens: int = 384


class Search:
    """`overrides` are what was chosen so far."""

    def __init__(
        self, wanted: Wanted, folder: Path, runner: Runner, tell: Tell, allow: Sequence[str] = ()
    ):
        self.wanted, self.folder, self.runner = wanted, folder, runner
        self.tell, self.allow = tell, allow
        self.overrides = wanted.overrides

    def steps(self) -> Iterator[Step]:
        """One a knob, as it is settled. The folder is ours until the last one is."""
        with owned(find_recipe(self.wanted.recipe), self.folder):
            for knob in KNOBS:
                left = self._left(knob)
                metric = self.wanted.goal.metric(knob)
                yield Step(knob, metric, left=left) if left else self._step(knob, metric)

    def _left(self, knob: Knob) -> str:
        drafter = compose(self.wanted.recipe, self.overrides).choices["drafter"]
        if knob.drafts and drafter == "none":
            return "nobody drafts"
        return self.wanted.goal.left.get(knob.name, "")

    def _step(self, knob: Knob, metric: str) -> Step:
        rows = self._measure(knob)
        if rows[0].reason:
            raise HeadraceError(
                f"{self.wanted.recipe} cannot be measured as it is: {rows[0].reason}"
            )
        floor = self.wanted.floor if knob.quality else None
        fit = [row for row in rows if not refusal(row, floor)]
        if not fit:
            whys = [f"{row.label}: {refusal(row, floor)}" for row in rows]
            raise HeadraceError("\n  ".join([f"no {knob.name} can be chosen:", *whys]))
        best = fit[0]
        verdicts = []
        for row in rows:
            verdicts.append(judge(row, best, metric, floor))
            best = row if verdicts[-1].better else best
        chosen = "" if best is rows[0] else best.label
        self.overrides = (*self.overrides, *shlex.split(chosen))
        return Step(knob, metric, tuple(verdicts), chosen)

    def _measure(self, knob: Knob) -> list[Row]:
        """First what is chosen so far, then each candidate that is something else."""
        asks = self.wanted.goal.asks
        points = [Point((), (*self.overrides, *asks))]
        points += [
            Point((text,), (*self.overrides, *shlex.split(text), *asks)) for text in knob.candidates
        ]
        wanted = self.wanted
        tokens = wanted.quality_tokens if knob.quality else 0
        path = find_recipe(wanted.recipe)
        experiment = Experiment(
            wanted.recipe, path, tuple(points), METRICS, wanted.repeats, tokens, tuple(self.allow)
        )
        return measure(experiment, self.folder, self.runner, self.tell)
