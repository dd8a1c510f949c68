"""What differs between a lock and what is here, or between two locks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import HeadraceError, nearest

COMPARED = ("choices", "config", "graph", "code", "artifacts", "model", "packages", "platform")
MEND = {
    "choices": "Choose it in the recipe, and lock that.",
    "config": "Leave it as it was locked, or allow it: --allow-drift {name}",
    "graph": "The stages' own code has changed: install headrace as it was, or lock the recipe again.",
    "code": "Install headrace as it was, or lock the recipe again.",
    "artifacts": "Bring it back as it was (or say where it is now: {place}=… --allow-drift "
    "config.{place}), or lock the recipe again.",
    "model": "Tokenizer, template or weights are not what was tested: lock the recipe again.",
    "packages": "pip install {package}=={locked}, or allow it: --allow-drift packages",
    "platform": "On another machine on purpose? --allow-drift platform, and then headrace replay",
}
PLACES = {"adapters": "adapters.folders", "kv": "kv.map"}  # of files; elsewhere it is `path`
ABSENT = "nothing"


class DriftError(HeadraceError):
    """What is here is not what was locked; every difference in one line."""

    def __init__(self, place: str, differences: Sequence[Difference]):
        count = len(differences)
        noun = "1 difference" if count == 1 else f"{count} differences"
        lines = "\n".join(f"- {one}" for one in differences)
        super().__init__(f"{place} does not describe what is here, {noun}:\n{lines}")


@dataclass(frozen=True)
class Difference:
    """`name` is a dotted path: section, then what in it."""

    name: str
    locked: Any
    here: Any

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        package = self.name.partition(".")[2]
        group = package.partition(".")[0]
        place = PLACES.get(group, f"{group}.path")
        words = {"name": self.name, "package": package, "place": place}
        hint = MEND[self.section].format(**words, locked=self.locked)
        if self.section == "packages" and self.locked == ABSENT:
            hint = f"pip uninstall {package}, or allow it: --allow-drift packages"
        return f"{self.told('here')}. {hint}"

    def told(self, other: str) -> str:
        """Without a hint; `other` says where the second value is."""
        return f"{self.name}: {_short(self.locked)} was locked, {_short(self.here)} is {other}"


def differences(locked: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Of the sections that both have, in the order of a lock."""
    return [
        Difference(name, before, after)
        for section in COMPARED
        if section in locked and section in other
        for name, before, after in _apart(section, locked[section], other[section])
    ]


def _apart(name: str, one: Any, two: Any) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ, by dotted path; a file or a package that is only on one side is one leaf."""
    leaf = not (isinstance(one, Mapping) and isinstance(two, Mapping))
    if leaf or {"bytes", "digest"} == set(one) == set(two):
        if one != two:
            yield name, one, two
        return
    for key in dict.fromkeys([*one, *two]):
        yield from _apart(f"{name}.{key}", one.get(key, ABSENT), two.get(key, ABSENT))


def refused(found: Iterable[Difference], allowed: Sequence[str]) -> list[Difference]:
    """Those that no allowed name covers: a section, or the beginning of a dotted path."""
    return [
        one for one in found if not any(f"{one.name}.".startswith(f"{name}.") for name in allowed)
    ]


def allowances(text: str | None) -> list[str]:
    """`--allow-drift`, read. HeadraceError for what no section is called."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if (section := name.partition(".")[0]) not in COMPARED:
            known = f"{nearest(section, COMPARED)} It takes: {', '.join(COMPARED)}.".strip()
            raise HeadraceError(f"--allow-drift: nothing is called '{name}'. {known}")
    return names


def _short(value: Any) -> str:
    """A value in a line; of a file, its size and the head of its digest."""
    if isinstance(value, Mapping) and {"bytes", "digest"} == set(value):
        return f"{value['bytes']:,} bytes ({value['digest'][:12]})"
    if isinstance(value, Mapping):
        value = ", ".join(map(str, value)) or ABSENT
    text = str(value) if value != "" else "''"
    return text if len(text) <= 100 else f"{text[:97]}…"
