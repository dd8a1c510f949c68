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

from pipeline.catalog import SWEEP, find_recipe, first_comment
from pipeline.compose import load_recipe, sweep_values
from pipeline.compose import read as read_value
from pipeline.errors import ConfigError, Problem, nearest
from pipeline.lab.metrics import METRICS, QUALITY
from pipeline.lab.options import Case, Options, is_setting, key_of, names
from pipeline.overrides import is_override
from pipeline.secrets import typed

KEYS: Mapping[str, type] = {
    "params": dict,
    "cases": list,
    "metrics": list,
    "repeats": int,
    "quality_tokens": int,
}
CASE = "Type it as after a recipe: drafter=ngram depth.max=4"
QUOTE = "Several in {…} are quoted, as in {drafter: 'none,ngram'}; null itself is 'null'"
AS_IT_IS = "as it is"  # a point without overrides of its own
DEEP = "depth"  # where nobody drafts, it says nothing
DEFAULT = ("tokens_per_s", "ttft_ms", "kv_bytes_per_token", "peak_mb")
QUALITY_TOKENS = 512


@dataclass(frozen=True)
class Point:
    """One combination. `own` are the overrides that tell it from others, `overrides` are all; `bare`
    is what it is called without any of its own."""

    own: tuple[str, ...]
    overrides: tuple[str, ...]
    bare: str = AS_IT_IS

    @property
    def label(self) -> str:
        return label(typed(self.own), self.bare)


def label(own: Iterable[str], bare: str = AS_IT_IS) -> str:
    """A point's name, of overrides without secrets."""
    return " ".join(map(plain, own)) or bare


def plain(text: str) -> str:
    """An override as it is read: without the grammar's escapes and quotes."""
    key, equals, raw = text.partition("=")
    value, _ = read_value(raw)
    return f"{key}{equals}{value}" if isinstance(value, str) else text


def keys(owns: Iterable[Iterable[str]]) -> list[str]:
    """What points are told apart by."""
    return list(dict.fromkeys(key_of(text) for own in owns for text in own))


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
    goal: str = ""  # of the file, if it is an experiment
    strict: bool = False  # a metric that no point gives is a mistake

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        """Its question; what is varied where a recipe asks none."""
        varied = ", ".join(keys(point.own for point in self.points))
        return self.goal[:1].upper() + self.goal[1:] or f"{self.name} by {varied}"


def read(
    recipe: str, overrides: Sequence[str], asked: Mapping[str, Any], allow: Sequence[str] = ()
) -> Experiment:
    """`asked` are metrics, repeats and quality_tokens of the command line, which win. ConfigError
    lists what is wrong with the experiment itself; points are judged one by one, later."""
    path = find_recipe(recipe)
    body = load_recipe(path)
    said = body.get(SWEEP) or {}
    problems = list(_shape(path, said))
    if problems:
        raise ConfigError(problems)
    said = {**said, **{key: value for key, value in asked.items() if value is not None}}
    options = Options(path, body, allow)
    where = f"{path.name} {SWEEP}.cases"
    points = tuple(_points(said, overrides, options, where, problems))
    metrics = tuple(dict.fromkeys(map(str, said.get("metrics") or DEFAULT)))
    problems += [_unknown(name) for name in metrics if name not in METRICS]
    if not problems and not any(point.own for point in points):
        deep = any(map(_is_deep, (*said.get("params", ()), *overrides)))
        problems.append(_nothing(recipe, deep and not options.chosen(overrides, "drafter")))
    if problems:
        raise ConfigError(problems)
    tokens = said.get("quality_tokens", QUALITY_TOKENS) if set(metrics) & set(QUALITY) else 0
    repeats = said.get("repeats", 3)
    goal = first_comment(path).removeprefix("Goal:").strip() if SWEEP in body else ""
    strict = not overrides or asked.get("metrics") is not None
    return Experiment(recipe, path, points, metrics, repeats, tokens, tuple(allow), goal, strict)


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


def _unknown(name: str) -> Problem:
    hint = f"{nearest(name, METRICS)} Metrics: {', '.join(METRICS)}."
    return Problem("metrics", f"no metric '{name}'.", hint.strip())


def _is_deep(text: Any) -> bool:
    return key_of(str(text)).partition(".")[0] == DEEP


def _nothing(recipe: str, deep: bool) -> Problem:
    if deep:
        what = "has no points to compare: where nobody drafts (drafter=none), how deep makes none."
        return Problem(recipe, what, "Add somebody who drafts: drafter=suffix")
    what = "has no points to compare: nothing in it takes more than one value."
    hint = (
        f"Give a setting several: headrace sweep {shlex.quote(recipe)} kv=native,kv8. Experiments that have "
        "points: kv_quality, drafters, depth, tiers, rows. One point is: headrace bench"
    )
    return Problem(recipe, what, hint)


def _points(
    said: Mapping[str, Any],
    overrides: Sequence[str],
    options: Options,
    where: str,
    problems: list[Problem],
) -> Iterator[Point]:
    """Cases x parameters; what the command line says of a key replaces what either says of it."""
    raw = {key_of(str(key)): value for key, value in said.get("params", {}).items()}
    raw |= {key_of(text): text.partition("=")[2] for text in overrides if _sets(text)}
    others = [text for text in overrides if not _sets(text)]
    gone = [key_of(text) for text in others]
    asked = {
        key: [f"{key}={value}" for value in _values(key, value, problems)]
        for key, value in raw.items()
        if key not in gone
    }
    cases = list(_cases(said.get("cases", []), where, problems)) or [()]
    for key in gone:
        cases = [_without(case, key) for case in cases]
    for key in [key for key in asked if not is_setting(key)]:
        if any(_chooses(case, key) for case in cases):
            cases = list(_overruled(cases, key, asked.pop(key)))
    combined = list(product(cases, product(*asked.values())))
    laid = list(_laid(combined, others, options))
    shared = set.intersection(*(set(words) for _, words in laid)) if laid else set()
    found: dict[tuple[str, ...], Point] = {}
    for case, words in laid:
        own = (*case, *(text for text in words if _sets(text) and text not in shared))
        every = (*own, *(text for text in words if text not in own))
        found.setdefault(every, Point(own, every))
    yield from found.values()


def _laid(
    combined: Sequence[tuple[Case, Case]], plain: Sequence[str], options: Options
) -> Iterator[tuple[Case, Case]]:
    """What each case says, and the words that go with it. A setting replaces the case's; points that
    choose what does not take it are without it, if others do. Where nobody drafts, how deep is left
    out, if it varies or somebody else drafts: else nobody would say what is wrong with it."""

    def takes(case: Case, words: Case, key: str) -> bool:
        return not is_setting(key) or _says(case, key) or options.take((*case, *words), key)

    def idle(case: Case, words: Case) -> bool:
        return not options.chosen((*case, *words, *plain), "drafter")

    keys = {key_of(text) for _, words in combined for text in (*words, *plain)}
    meant = {key for key in keys if any(takes(*both, key) for both in combined)}
    kept = set[str]()
    if combined and all(idle(*both) for both in combined):
        kept = set.intersection(*(set(words) for _, words in combined)) | set(plain)
    for case, words in combined:
        said, more = case, []
        for text in (*words, *plain):
            key = key_of(text)
            if is_setting(key) and _says(case, key):
                said = (*_without(said, key), text)
            elif key not in meant or takes(case, words, key):
                more.append(text)
        if idle(case, words):
            said, more = _without(said, DEEP), [t for t in more if t in kept or not _is_deep(t)]
        yield said, tuple(more)


def _cases(said: Iterable[Any], where: str, problems: list[Problem]) -> Iterator[Case]:
    """A case may sweep too: `drafter=ngram,suffix depth.max=16` is two cases."""
    for index, case in enumerate(said):
        try:
            words = _words(case)
        except ValueError as error:
            problems.append(Problem(f"{where}[{index}]", f"{case!r} {error}.", CASE))
        else:
            yield from product(*(_spread(text, problems) for text in words))


def _words(case: Any) -> list[str]:
    """ValueError says why it is no case."""
    if not isinstance(case, str):
        raise ValueError("is no text")
    try:
        words = shlex.split(case)
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from error
    if wrong := [word for word in words if not is_override(word)]:
        raise ValueError(f"cannot be read: '{wrong[0]}' is not an override")
    return words


def _spread(text: str, problems: list[Problem]) -> list[str]:
    if not _sets(text):
        return [text]
    key = key_of(text)
    return [f"{key}={value}" for value in _values(key, text.partition("=")[2], problems)]


def _overruled(cases: Sequence[Case], key: str, words: Sequence[str]) -> Iterator[Case]:
    """The cases when `words` are what is said of an option. Those stay that choose it, with all that
    belongs to it; one that none chooses takes another's place in the plainest of them."""
    wanted = [names(word) for word in words]
    known = []
    for case in cases:
        if not (chosen := _chooses(case, key)):
            yield from ((*case, word) for word in words)
        elif chosen[-1] in wanted:
            yield case
        known += chosen
    plainest = _without(min((case for case in cases if _chooses(case, key)), key=len), key)
    yield from ((*plainest, word) for word in words if names(word) not in known)


def _chooses(case: Case, key: str) -> list[tuple[str, ...]]:
    return [names(text) for text in case if key_of(text) == key]


def _says(case: Case, key: str) -> bool:
    """Something of the key, or of what is below it."""
    return _without(case, key) != case


def _sets(text: str) -> bool:
    """`~key` takes away."""
    return "=" in text and not text.startswith("~")


def _without(case: Case, key: str) -> Case:
    """What it says of other things than the key and what is below it."""
    return tuple(text for text in case if not f"{key_of(text)}.".startswith(f"{key}."))


def _values(key: object, raw: Any, problems: list[Problem]) -> list[str]:
    """The values of one parameter: Hydra's grammar in a text, or a YAML list."""
    try:
        if raw is None or raw == []:
            raise ValueError(f"has no value. {QUOTE}")
        one = not isinstance(raw, list)
        return sweep_values(_typed(raw)) if one else [_typed(item) for item in raw]
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
