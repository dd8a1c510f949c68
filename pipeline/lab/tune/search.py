"""Knob after knob: each is tried with what was chosen before, and the best that is better is kept.

Not every combination is measured (that is what `headrace sweep` is for); the order is from what changes
most to what changes least. Points are kept in a folder, so that a search that was broken off goes on.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.catalog import find_recipe, load_yaml
from pipeline.compose import Composed, compose, leaves
from pipeline.errors import HeadraceError
from pipeline.lab.experiment import AS_IT_IS, Experiment, Point
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
        wanted, asks = self.wanted, self.wanted.goal.asks
        so_far = AS_IT_IS if self.overrides == self.wanted.overrides else "as chosen so far"
        points = [Point((), (*self.overrides, *asks), so_far)]
        now = compose(wanted.recipe, self.overrides)
        for candidate in knob.candidates:
            words = moved(now, shlex.split(candidate))
            points.append(Point((shlex.join(words),), (*self.overrides, *words, *asks)))
        tokens = wanted.quality_tokens if knob.quality else 0
        path = find_recipe(wanted.recipe)
        experiment = Experiment(
            wanted.recipe, path, tuple(points), METRICS, wanted.repeats, tokens, tuple(self.allow)
        )
        return measure(experiment, self.folder, self.runner, self.tell)


def moved(now: Composed, words: Sequence[str]) -> list[str]:
    """What is typed to get another option as it is listed. Settings that were made for the one that is
    left, in the recipe or before, do not go with it."""
    typed = {word.partition("=")[0] for word in words}
    said = list(words)
    for group, _, option in (word.partition("=") for word in words):
        if now.choices.get(group, option) != option:
            listed = load_yaml(now.options(group)[option])
            said += [
                _as_listed(f"{group}.{key}", key, listed)
                for key in _settings(now, group)
                if f"{group}.{key}" not in typed
            ]
    return said


def _settings(now: Composed, group: str) -> list[str]:
    """Names of those that somebody has set."""
    paths = [path for path, _ in leaves(now.config[group], group) if path in now.sources]
    return list(dict.fromkeys(path.split(".")[1] for path in paths))


def _as_listed(path: str, key: str, listed: Mapping[str, Any]) -> str:
    if key not in listed:
        return f"~{path}"
    value = listed[key]
    return f"{path}={value if isinstance(value, str) else json.dumps(value)}"
