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
NOBODY = "drafter=none"
DEFAULT = ("tokens_per_s", "ttft_ms", "kv_bytes_per_token", "peak_mb")
QUALITY_TOKENS = 512

Case = tuple[str, ...]  # overrides that go together


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
    allow: tuple[str, ...] = ()  # packages whose classes may run, as `--allow-code` has them

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def goal(self) -> str:
        return first_comment(self.path).removeprefix("Goal:").strip()


def read(
    recipe: str, overrides: Sequence[str], asked: Mapping[str, Any], allow: Sequence[str] = ()
) -> Experiment:
    """`asked` are metrics, repeats and quality_tokens of the command line, which win. ConfigError
    lists what is wrong with the experiment itself; points are judged one by one, later."""
    path = find_recipe(recipe)
    body = load_yaml(path)
    said = (body.get(SWEEP) or {}) if isinstance(body, Mapping) else {}
    problems = list(_shape(path, said))
    if problems:
        raise ConfigError(problems)
    said = {**said, **{key: value for key, value in asked.items() if value is not None}}
    points = tuple(_points(said, overrides, f"{path.name} {SWEEP}.cases", problems))
    metrics = tuple(said.get("metrics") or DEFAULT)
    problems += [_unknown(name) for name in metrics if name not in METRICS]
    if not problems and not any(point.own for point in points):
        problems.append(_nothing(recipe))
    if problems:
        raise ConfigError(problems)
    tokens = said.get("quality_tokens", QUALITY_TOKENS) if set(metrics) & set(QUALITY) else 0
    repeats = said.get("repeats", 3)
    return Experiment(recipe, path, points, metrics, repeats, tokens, tuple(allow))


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


def _nothing(recipe: str) -> Problem:
    what = "has no points to compare: nothing in it takes more than one value."
    hint = (
        f"Give a setting several: headrace sweep {recipe} kv=native,kv8. Experiments that have "
        "points: kv_quality, drafters, depth, tiers, rows. One point is: headrace bench"
    )
    return Problem(recipe, what, hint)


def _points(
    said: Mapping[str, Any], overrides: Sequence[str], where: str, problems: list[Problem]
) -> Iterator[Point]:
    """Cases x parameters; what the command line says of a key replaces what either says of it."""
    raw = {_key(str(key)): value for key, value in said.get("params", {}).items()}
    raw |= {_key(text): text.partition("=")[2] for text in overrides if _sets(text)}
    plain = [text for text in overrides if not _sets(text)]
    gone = [_key(text) for text in plain]
    asked = {
        key: [f"{key}={value}" for value in _values(key, value, problems)]
        for key, value in raw.items()
        if key not in gone
    }
    cases = list(_cases(said.get("cases", []), where, problems)) or [()]
    for key in gone:
        cases = [_without(case, key) for case in cases]
    for key in sorted(asked, key=_is_setting):
        if any(_says(case, key) for case in cases):
            cases = list(_overruled(cases, key, asked.pop(key)))
    varied = [words for words in asked.values() if len(words) > 1]
    fixed = [words[0] for words in asked.values() if len(words) == 1]
    found: dict[tuple[str, ...], Point] = {}
    for case in cases:
        for combined in product(*varied):
            own = _drafting((*case, *combined))
            every = (*own, *fixed, *plain)
            found.setdefault(every, Point(own, every))
    yield from found.values()


def _cases(said: Iterable[Any], where: str, problems: list[Problem]) -> Iterator[Case]:
    """A case may sweep too: `drafter=ngram,suffix depth.max=16` is two cases."""
    for case in said:
        try:
            words = shlex.split(str(case))
        except ValueError as error:
            hint = "A case is typed as after a recipe: drafter=suffix depth.max=4,8"
            problems.append(Problem(where, f"{str(case)!r} cannot be read: {error}.", hint))
        else:
            yield from product(*(_spread(text, problems) for text in words))


def _spread(text: str, problems: list[Problem]) -> list[str]:
    if not _sets(text):
        return [text]
    key = _key(text)
    return [f"{key}={value}" for value in _values(key, text.partition("=")[2], problems)]


def _overruled(cases: Sequence[Case], key: str, words: Sequence[str]) -> Iterator[Case]:
    """The cases when `words` are what is said of the key. A setting replaces theirs. An option keeps the
    cases that choose it, with all that belongs to it; one that none chooses takes another's place in
    the plainest of them."""
    option = not _is_setting(key)
    named = [case for case in cases if _says(case, key)]
    for case in cases:
        if not (option and case in named):
            kept = case if option else _without(case, key)
            yield from ((*kept, word) for word in words)
        elif set(words) & set(case):
            yield case
    if option:
        plainest = _without(min(named, key=len), key)
        known = {word for case in named for word in case}
        yield from ((*plainest, word) for word in words if word not in known)


def _says(case: Case, key: str) -> bool:
    """Of a setting also what is below it."""
    return _without(case, key) != case if _is_setting(key) else key in map(_key, case)


def _sets(text: str) -> bool:
    """`~key` takes away."""
    return "=" in text and not text.startswith("~")


def _is_setting(key: str) -> bool:
    """Else one chooses an option with it."""
    return "." in key


def _without(case: Case, key: str) -> Case:
    """What it says of other things than the key and what is below it."""
    return tuple(text for text in case if not f"{_key(text)}.".startswith(f"{key}."))


def _drafting(own: Case) -> Case:
    """Where nobody drafts, how deep says nothing, and makes no points that differ."""
    return _without(own, "depth") if NOBODY in own else own


def _key(text: str) -> str:
    """As it is looked for: `model@draft_model` may also be typed `draft_model`."""
    key = text.partition("=")[0].strip().lstrip("~+")
    return key if _is_setting(key) else key.rpartition("@")[2]


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
