"""What differs between a lock and what is here, or between two locks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any

from pipeline.compose import leaves
from pipeline.errors import HeadraceError, nearest

COMPARED = ("choices", "config", "graph", "code", "artifacts", "model", "packages", "platform")
MEND = {
    "choices": "Choose it in the recipe, and lock that.",
    "config": "Leave it as it was locked, or allow it: --allow-drift {name}",
    "graph": "The stages' own code has changed: install headrace as it was, or lock the recipe again.",
    "code": "Install headrace as it was, or lock the recipe again.",
    "artifacts": "Bring it back as it was{moved}, or lock the recipe again.",
    "model": "Tokenizer, template or weights are not what was tested: lock the recipe again.",
    "packages": "pip install {package}=={locked}, or allow it: --allow-drift packages",
    "platform": "On another machine on purpose? --allow-drift platform, and then headrace replay",
}
MOVED = " (or say where it is now: {place}=… --allow-drift config.{place})"
PLACES = ("path", "folder", "map", "folders")  # settings that say where an option's files are
SHELF = "shelf/"  # how names of files begin that lie on `adapters.shelf`
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
    place: str = ""  # the setting that says where an artifact is

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        package = self.name.partition(".")[2]
        moved = MOVED.format(place=self.place) if self.place else ""
        words = {"name": self.name, "package": package, "moved": moved}
        hint = MEND[self.section].format(**words, locked=self.locked)
        if self.section == "packages" and self.locked == ABSENT:
            hint = f"pip uninstall {package}, or allow it: --allow-drift packages"
        return f"{self.told('here')}. {hint}"

    def told(self, other: str) -> str:
        """Without a hint; `other` says where the second value is."""
        return f"{self.name}: {short(self.locked)} was locked, {short(self.here)} is {other}"


def differences(locked: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Of the sections that both have, in the order of a lock."""
    return [
        Difference(name, before, after, _place(name, locked.get("config", {})))
        for section in COMPARED
        if section in locked and section in other
        for name, before, after in _apart(section, locked[section], other[section])
    ]


def _place(name: str, config: Mapping[str, Any]) -> str:
    """The setting of the chosen option that says where an artifact is, if it has one."""
    section, _, artifact = name.partition(".")
    group = artifact.partition(".")[0]
    if artifact.startswith(f"adapters.{SHELF}"):
        return "adapters.shelf"
    known = (config.get(group) or {}) if section == "artifacts" else {}
    return next((f"{group}.{key}" for key in PLACES if key in known), "")


def _apart(name: str, one: Any, two: Any) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ, by dotted path; a file or a package that is only on one side is one leaf."""
    leaf = not (isinstance(one, Mapping) and isinstance(two, Mapping))
    if leaf or {"bytes", "digest"} == set(one) == set(two):
        if one != two:
            yield name, one, two
        return
    for key in dict.fromkeys([*one, *two]):
        yield from _apart(f"{name}.{key}", one.get(key, ABSENT), two.get(key, ABSENT))


def probes_apart(
    locked: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]
) -> list[Difference]:
    """Of two locks: each probe that was asked otherwise, or answered otherwise, from which token on."""
    one, two = ({probe["name"]: probe for probe in probes} for probes in (locked, other))
    return [
        Difference(f"probes.{name}.{place}", before, after)
        for name in dict.fromkeys([*one, *two])
        for place, before, after in _parting(one.get(name, {}), two.get(name, {}))
    ]


def _parting(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Where they part, if they do. Scores do not count: they move with the machine."""
    for key in ("prompt", "wanted", "prompt_tokens"):
        asked, otherwise = (str(probe.get(key, ABSENT)) for probe in (one, two))
        if asked != otherwise:
            yield key, asked, otherwise
            return
    answers = zip_longest(one["token_ids"], two["token_ids"], fillvalue="the end")
    for at, (token, came) in enumerate(answers):
        if token != came:
            yield f"token {at}", token, came
            return


def without_newcomers(locked: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Artifacts that are here, but for folders that have come to the shelf since: they are in nobody's answer
    until somebody mounts them."""
    if not isinstance(files := here.get("adapters"), Mapping):
        return dict(here)
    known = {_folder(name) for name in locked.get("adapters", ())}
    kept = {
        name: file
        for name, file in files.items()
        if not name.startswith(SHELF) or _folder(name) in known
    }
    others = {group: files for group, files in here.items() if group != "adapters"}
    return {**others, "adapters": kept} if kept else others


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def refused(found: Iterable[Difference], allowed: Sequence[str]) -> list[Difference]:
    """Those that no allowed name covers: a section, or the beginning of a dotted path."""
    return [
        one for one in found if not any(f"{one.name}.".startswith(f"{name}.") for name in allowed)
    ]


def allowances(text: str | None) -> list[str]:
    """The names of `--allow-drift`."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def check_names(
    allowed: Iterable[str], locked: Mapping[str, Any], found: Iterable[Difference]
) -> None:
    """HeadraceError for a name that nothing has: no value that was locked, none that is only here, and no group
    that files may come to."""
    paths = [path for section in COMPARED for path, _ in leaves(locked[section], section)]
    known = {f"artifacts.{group}" for group in locked["choices"]}
    for path in (*paths, *(one.name for one in found)):
        known.update(accumulate(path.split("."), "{}.{}".format))
    for name in allowed:
        if name not in known:
            hint = (
                f"{nearest(name, sorted(known))} It takes: {', '.join(COMPARED)}, or a name in one."
            )
            raise HeadraceError(f"--allow-drift: nothing is called '{name}'. {hint.strip()}")


def short(value: Any) -> str:
    """A value in a line; of a file, its size and the head of its digest."""
    if isinstance(value, Mapping) and {"bytes", "digest"} == set(value):
        return f"{value['bytes']:,} bytes ({value['digest'][:12]})"
    if isinstance(value, Mapping):
        value = ", ".join(map(str, value)) or ABSENT
    text = str(value).replace("\n", r"\n") if value != "" else "''"
    return text if len(text) <= 100 else f"{text[:97]}…"
