"""What is typed after a recipe: `group=option`, `key.path=value`, `~key.path`.

Values follow Hydra's grammar (numbers, lists, mappings, quotes). What the grammar cannot read is
kept as text, since most of it is text: paths with `=`, `(`, `%`, `#`, commas or accents just work
where a text is wanted, and elsewhere the constructor check says what was wanted instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.catalog import ALWAYS, Catalog
from pipeline.errors import Problem, nearest

KEY = re.compile(r"(?P<sign>~|\+\+|\+)?(?P<key>[\w$./@:-]+)")


@dataclass(frozen=True)
class Choice:
    """An option for a group; `option` is whatever was typed, checked by `compose`."""

    key: str
    option: Any


@dataclass(frozen=True)
class Value:
    """A value for a path; `text` is what was typed unless it was quoted or a list or mapping."""

    path: str
    value: Any
    text: str | None


@dataclass(frozen=True)
class Removal:
    """A setting to be left to its constructor's default."""

    path: str


Override = Choice | Value | Removal
Read = Callable[[str], tuple[Any, str | None]]


def parse(overrides: Sequence[str], groups: Sequence[str], read: Read) -> list[Override | Problem]:
    """Read all overrides; each that cannot be understood becomes a problem in its place.

    `groups` are all keys that take an option; `model@draft_model` may also be typed `draft_model`.
    `read` gives a typed value and, where a text may still be wanted, the text as typed.
    """
    names = {key: key for key in groups} | {
        key.partition("@")[2]: key for key in groups if "@" in key
    }
    return [_parse(text, names, read) for text in overrides]


def is_override(text: str) -> bool:
    """By its shape, whether there is such a key or not."""
    match = _named(text)
    return bool(match and ("=" in text or match["sign"] == "~"))


def _named(text: str) -> re.Match[str] | None:
    left = text.partition("=")[0]
    return None if ".." in left else KEY.fullmatch(left.strip())


def _parse(text: str, groups: Mapping[str, str], read: Read) -> Override | Problem:
    _, equals, raw = text.partition("=")
    match = _named(text)
    if not match:
        return Problem(text, "is not an override.", "Type key=value or group=option.")
    key = match["key"]
    group = groups.get(key) or groups.get(key.replace(".", "/"))
    if match["sign"] == "~":
        return (
            Problem(text, "a group is never taken away.", f"Try: {key}=none")
            if group
            else Removal(key)
        )
    if not equals:
        hint = f"Type {key}=VALUE. {'' if '.' in key or group else nearest(key, groups)}"
        return Problem(text, "is not an override.", hint.strip())
    value, typed = read(raw)
    if group:
        return Choice(group, _option(value, typed))
    return Value(key, value, typed) if "." in key else _no_group(key, groups)


def _no_group(key: str, groups: Mapping[str, str]) -> Problem:
    names = ", ".join(name for name in groups if "/" not in name and "@" not in name)
    return Problem(
        key, "no such group or setting.", f"{nearest(key, groups)} Groups: {names}.".strip()
    )


def _option(value: Any, typed: str | None) -> Any:
    """An option's name as typed; lists stay lists; null and mappings are no names."""
    if isinstance(value, list):
        return [str(item) for item in value]
    if value is None or isinstance(value, dict):
        return None
    return str(value) if typed is None else typed


def choice_problem(
    key: str, option: Any, base: Mapping[str, Any], catalog: Catalog
) -> Problem | None:
    """Why `key=option` is no choice of a group, or None if it is one."""
    group = key.partition("@")[0]
    if group == ALWAYS:
        what = "is no choice: every stage's settings are there."
        return Problem(key, what, f"Set {ALWAYS}.<name>.<setting>=…")
    if key not in base and "/" not in group:
        return Problem(key, "no such group.", f"{nearest(key, base)} Try: headrace list".strip())
    known = catalog.options(group)
    many = isinstance(base.get(key), list)
    options = option if isinstance(option, list) else [option]
    names = ", ".join(known)
    if option is None or (isinstance(option, list) and not many):
        usual = base[key] if isinstance(base.get(key), str) else next(iter(known), "…")
        return Problem(key, f"takes one of its options: {names}.", f"Try: {key}={usual}")
    if twice := [name for name in dict.fromkeys(options) if options.count(name) > 1]:
        return Problem(key, f"'{twice[0]}' is there twice.", "Leave one out.")
    bad = [str(name) for name in options if str(name) not in known]
    if isinstance(option, str) and "," in option and set(option.split(",")) <= set(known):
        if many:
            return Problem(key, "wants a list of several options.", f"Try: '{key}=[{option}]'")
        hint = f"To compare them: headrace sweep … {key}={option}"
        return Problem(key, "takes one option here.", hint)
    if bad:
        text = f"has no option '{bad[0]}'. {nearest(bad[0], known)} Options: {names}."
        return Problem(key, text.replace("  ", " "), f"Try: headrace list {group}")
    return None
