"""What a sweep measures: a recipe's `sweep:` part and the command line become points.

sweep:
  params: {kv: "native,kv8"}          # Hydra's sweep grammar; all are combined with all
  cases: [drafter=none, "drafter=two_model draft_model=smollm2"]   # and with each of these
  metrics: [tokens_per_s, kv_bytes_per_token, kl]
  repeats: 3
  quality_tokens: 512
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.catalog import SWEEP, find_recipe, first_comment, load_yaml
from pipeline.compose import sweep_values
from pipeline.errors import ConfigError, Problem, nearest
from pipeline.lab.metrics import METRICS, QUALITY
from pipeline.secrets import typed

KEYS: Mapping[str, type] = {
    "params": dict,
    "cases": list,
    "metrics": list,
    "repeats": int,
    "quality_tokens": int,
}
DEFAULT = ("tokens_per_s", "ttft_ms", "kv_bytes_per_token", "peak_mb")
QUALITY_TOKENS = 512


@dataclass(frozen=True)
class Point:
    """One combination. `own` are the overrides that tell it from others, `overrides` are all."""

    own: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        """Without secrets."""
        return " ".join(typed(self.own)) or "as it is"


@dataclass(frozen=True)
class Experiment:
    """A question: these points, these figures."""

    recipe: str
    path: Path
    points: tuple[Point, ...]
    metrics: tuple[str, ...]
    repeats: int
    quality_tokens: int  # 0: no metric asks for quality

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def goal(self) -> str:
        return first_comment(self.path).removeprefix("Goal:").strip()


def read(recipe: str, overrides: Sequence[str], asked: Mapping[str, Any]) -> Experiment:
    """`asked` are metrics, repeats and quality_tokens of the command line, which win. ConfigError
    lists what is wrong with the experiment itself; points are judged one by one, later."""
    path = find_recipe(recipe)
    body = load_yaml(path)
    said = (body.get(SWEEP) or {}) if isinstance(body, Mapping) else {}
    problems = list(_shape(path, said))
    if problems:
        raise ConfigError(problems)
    said = {**said, **{key: value for key, value in asked.items() if value is not None}}
    points = tuple(_points(said, overrides, problems))
    metrics = tuple(said.get("metrics") or DEFAULT)
    problems += [_unknown(name) for name in metrics if name not in METRICS]
    if not problems and (not points or points == (_alone(overrides),)):
        problems.append(_nothing(recipe))
    if problems:
        raise ConfigError(problems)
    tokens = said.get("quality_tokens", QUALITY_TOKENS) if set(metrics) & set(QUALITY) else 0
    return Experiment(recipe, path, points, metrics, said.get("repeats", 3), tokens)


def _shape(path: Path, said: Any) -> Iterator[Problem]:
    where = f"{path.name} {SWEEP}"
    if not isinstance(said, Mapping):
        yield Problem(where, "wants settings by name.", f"It takes: {', '.join(KEYS)}.")
        return
    for key, value in said.items():
        if key not in KEYS:
            hint = f"{nearest(key, KEYS)} It takes: {', '.join(KEYS)}."
            yield Problem(f"{where}.{key}", "no such setting.", hint.strip())
        elif not isinstance(value, KEYS[key]) or value is True:
            kind = {dict: "settings by name", list: "a list", int: "a whole number"}[KEYS[key]]
            yield Problem(f"{where}.{key}", f"wants {kind}, got {value!r}.")
        elif isinstance(value, int) and value < 1:
            yield Problem(f"{where}.{key}", f"wants 1 or more, got {value}.")


def _unknown(name: object) -> Problem:
    hint = f"{nearest(str(name), METRICS)} Metrics: {', '.join(METRICS)}."
    return Problem("metrics", f"no metric '{name}'.", hint.strip())


def _alone(overrides: Sequence[str]) -> Point:
    return Point((), tuple(overrides))


def _nothing(recipe: str) -> Problem:
    what = "has no points to compare: nothing in it takes more than one value."
    hint = (
        f"Give a setting several: headrace sweep {recipe} kv=native,kv8. Experiments that have "
        "points: kv_quality, drafters, depth, tiers, rows. One point is: headrace bench"
    )
    return Problem(recipe, what, hint)


def _points(
    said: Mapping[str, Any], overrides: Sequence[str], problems: list[Problem]
) -> Iterator[Point]:
    """Cases x parameters; what the command line says of a parameter replaces it."""
    typed = {_key(text): text.partition("=")[2] for text in overrides if "=" in text}
    plain = [text for text in overrides if "=" not in text]
    params = {
        str(key): _values(key, value, problems) for key, value in said.get("params", {}).items()
    }
    given = {key: _values(key, value, problems) for key, value in typed.items()}
    axes = {
        **params,
        **{key: values for key, values in given.items() if len(values) > 1 or key in params},
    }
    fixed = [f"{key}={values[0]}" for key, values in given.items() if key not in axes and values]
    cases = [tuple(shlex.split(str(case))) for case in said.get("cases", [])] or [()]
    varying = {key for key, values in axes.items() if len(values) > 1}
    swept = [[f"{key}={value}" for value in values] for key, values in axes.items()]
    found: dict[tuple[str, ...], Point] = {}
    for case in _spread(cases, problems):
        for combined in product(*swept):
            own = (*case, *(text for text in combined if _key(text) in varying))
            every = (*case, *combined, *fixed, *plain)
            found.setdefault(every, Point(own, every))
    yield from found.values()


def _spread(cases: Iterable[Sequence[str]], problems: list[Problem]) -> Iterator[tuple[str, ...]]:
    """A case may sweep too: `drafter=ngram,suffix depth.max=16` is two cases."""
    for case in cases:
        lists = [
            [
                f"{_key(text)}={value}"
                for value in _values(_key(text), text.partition("=")[2], problems)
            ]
            if "=" in text
            else [text]
            for text in case
        ]
        yield from product(*lists)


def _key(text: str) -> str:
    return text.partition("=")[0].strip()


def _values(key: object, raw: Any, problems: list[Problem]) -> list[str]:
    """The values of one parameter: Hydra's grammar in a text, or a YAML list."""
    if isinstance(raw, list):
        return [_typed(item) for item in raw]
    try:
        return sweep_values(_typed(raw))
    except ValueError as error:
        problems.append(Problem(str(key), str(error)))
        return []


def _typed(value: Any) -> str:
    """As one would type it."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return re.sub(r"\s*\n\s*", "", str(value))
