"""The file: sections, their seals, and what is wrong with one that was cut short or edited."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.catalog import dump_yaml, load_yaml
from pipeline.compose import compose, leaves
from pipeline.errors import ConfigError, HeadraceError, Problem, nearest
from pipeline.identity import digest
from pipeline.lab.lock.drift import ABSENT, short
from pipeline.secrets import storable
from pipeline.types.places import user_path

SUFFIX = ".lock.yaml"
VERSION = 2
COPY = "Copy it again from where it was made, or lock the recipe again."
AGAIN = "A lock is not edited: change the recipe, then headrace lock RECIPE -o NAME.lock.yaml"


@dataclass(frozen=True)
class Lock:
    """One lock. All plain data; `seals` has a digest of each value, by its dotted path."""

    lock: int  # version of this layout
    recipe: str
    made: Mapping[str, Any]  # date, overrides: for people, compared with nothing
    choices: Mapping[str, Any]  # group -> option, or list of options
    config: Mapping[str, Any]
    graph: str
    code: Mapping[str, str]  # package -> digest of its sources
    artifacts: Mapping[str, Any]  # group -> file -> bytes, digest
    model: Mapping[str, Any]  # what the opened model says of itself
    packages: Mapping[str, str]
    platform: Mapping[str, Any]
    probes: list[Mapping[str, Any]]
    seals: Mapping[str, str]
    digest: str  # of all the above


NAMES = tuple(f.name for f in fields(Lock))
MAPPINGS = (
    "made",
    "choices",
    "config",
    "code",
    "artifacts",
    "model",
    "packages",
    "platform",
    "seals",
)


def sealed(**sections: Any) -> Lock:
    """A lock of these sections, with its seals."""
    whole = {"lock": VERSION, **sections}
    whole["seals"] = seals(whole)
    return Lock(**whole, digest=digest(whole))


def seals(sections: Mapping[str, Any]) -> dict[str, str]:
    """Of each value, so that an edit can be named."""
    return {path: _seal(value) for path, value in _values(sections).items()}


def _values(sections: Mapping[str, Any]) -> dict[str, Any]:
    """What is sealed, by dotted path."""
    return dict(leaves({k: v for k, v in sections.items() if k not in ("seals", "digest")}))


def _seal(value: Any) -> str:
    return digest({"": value})


def refuse_place(path: Path) -> None:
    """ConfigError if a lock cannot be written there: asked before any work is done."""
    if not path.name.endswith(SUFFIX) or path.name == SUFFIX:
        raise _problem(path, f"a lock's name ends with {SUFFIX}.", f"Try: -o {path.stem}{SUFFIX}")
    with _unfinished(path) as partial:
        if path.exists():
            raise _problem(path, "is there already.", "Take another name, or remove it first.")
        if not path.parent.is_dir():
            raise _problem(path, f"there is no folder {path.parent}.", "Make it first.")
        partial.touch()


def write(lock: Lock, path: Path) -> None:
    """Whole or not at all."""
    refuse_place(path)
    text = HEAD.format(recipe=lock.recipe, date=lock.made["date"], name=path.name)
    with _unfinished(path) as partial:
        partial.write_text(text + dump_yaml(asdict(lock)), encoding="utf-8")
        partial.replace(path)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A file beside it, gone at the end. ConfigError for what the system does not let us do."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
    except OSError as error:
        what = f"cannot be written: {error.strerror}."
        raise _problem(path, what, f"Try another folder: -o FOLDER/{path.name}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


HEAD = """\
# {recipe} as it was tested on {date}. Made by `headrace lock`; not to be edited.
#   headrace serve {name}     serves exactly this, or says what differs and does not
#   headrace replay {name}    asks the probes again and compares every token
"""


def read(place: str) -> Lock:
    """ConfigError names what is wrong with the file: all unknown keys, or all edited parts, at once."""
    path = user_path(place)
    if problem := _absent(path):
        raise ConfigError([problem])
    try:
        found = load_yaml(path)
    except ConfigError as error:
        text = error.problems[0].what.replace("\n", " ")
        raise _problem(path, text, f"Was it cut short? {COPY}") from error
    if not isinstance(found, Mapping):
        raise _problem(path, "is no lock: it holds no sections.", f"Was it cut short? {COPY}")
    if found.get("lock", VERSION) != VERSION:
        what = f"has the layout {found['lock']!r}; this version of headrace reads {VERSION}."
        raise _problem(path, what, "Lock the recipe again.")
    for check in (_unknown, _missing, _misshapen, _edited):
        if problems := list(check(path, found)):
            raise ConfigError(problems)
    return Lock(**found)


def _absent(path: Path) -> Problem | None:
    """Why there is no lock of that name."""
    if path.is_dir():
        locks = ", ".join(sorted(file.name for file in path.glob(f"*{SUFFIX}")))
        hint = f"Locks in it: {locks}." if locks else f"Name a file: {path / 'NAME'}{SUFFIX}"
        return Problem(str(path), "is a folder, not a lock.", hint)
    if not path.name.endswith(SUFFIX):
        hint = f"Of a recipe, make one first: headrace lock {path} -o {path.stem}{SUFFIX}"
        return Problem(str(path), f"is no lock: a lock's name ends with {SUFFIX}.", hint)
    if not path.is_file():
        return Problem(
            str(path), "there is no such lock.", f"Make one: headrace lock RECIPE -o {path}"
        )
    return None


def _problem(path: Path, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(str(path), what, hint)])


def _unknown(path: Path, found: Mapping[str, Any]) -> Iterator[Problem]:
    for key in found:
        if key not in NAMES:
            hint = f"{nearest(str(key), NAMES)} {AGAIN}".strip()
            yield Problem(f"{path} {key}", "a lock has no such section.", hint)


def _missing(path: Path, found: Mapping[str, Any]) -> Iterator[Problem]:
    if absent := [name for name in NAMES if name not in found]:
        cut = absent == list(NAMES[-len(absent) :])
        what = f"lacks {', '.join(absent)}" + (": it was cut short." if cut else ".")
        yield Problem(str(path), what, COPY)


def _misshapen(path: Path, found: Mapping[str, Any]) -> Iterator[Problem]:
    for name in MAPPINGS:
        if not isinstance(found[name], Mapping):
            yield Problem(f"{path} {name}", "wants settings by name.", AGAIN)
    if not isinstance(found["probes"], list):
        yield Problem(f"{path} probes", "wants a list.", AGAIN)


def _edited(path: Path, found: Mapping[str, Any]) -> Iterator[Problem]:
    now, seals = _values(found), found["seals"]
    wrong = [
        name
        for name in dict.fromkeys([*seals, *now])
        if name not in now or seals.get(name) != _seal(now[name])
    ]
    before = _before(found) if wrong else {}
    for name in wrong:
        is_now = short(now.get(name, ABSENT))
        told = f"; it now says {is_now}."
        if name not in seals:
            told = f": {ABSENT} -> {is_now}."
        elif name in before and _seal(before[name]) == seals[name]:
            told = f": {short(before[name])} -> {is_now}."
        yield Problem(f"{path} {name}", f"was edited after the lock was made{told}", AGAIN)
    whole = {name: found[name] for name in NAMES if name != "digest"}
    if not wrong and digest(whole) != found["digest"]:
        yield Problem(f"{path} digest", "was edited after the lock was made.", AGAIN)


def _before(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the recipe says today, if it is here: where that has the seal of what was edited, it is what
    was locked."""
    try:
        composed = compose(found["recipe"], found["made"]["overrides"])
    except (HeadraceError, LookupError, TypeError, AttributeError):  # edited, too
        return {}
    config = storable(composed.config, composed.sources)
    return _values({"choices": storable(composed.choices, {}), "config": config})
