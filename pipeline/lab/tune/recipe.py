"""A recipe that says what was composed: choices that differ from base, and values that were set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.catalog import ALWAYS, dump_yaml
from pipeline.compose import OVERLAYS, Composed, compose, leaves
from pipeline.errors import ConfigError, Problem
from pipeline.secrets import ENVIRONMENT, storable

NOT_OURS = ("workload",)  # how it was measured is not what is served
# Sources of values that a recipe has to repeat. Overlays are repeated, not chosen: they would win over it.
SET = ("recipe ", "command line", ENVIRONMENT, *(f"{group}=" for group in OVERLAYS))


def text(composed: Composed, comments: Iterable[str]) -> str:
    """The whole file, comments first."""
    lines = [f"# {' '.join(line.splitlines())}" for line in comments]
    values = _values(composed)
    told = [dump_yaml(values).rstrip()] if values else []
    return "\n".join([*lines, *_defaults(composed), *told]) + "\n"


def _defaults(composed: Composed) -> list[str]:
    base = composed.catalog.base_choices()
    chosen = {
        key: option
        for key, option in composed.choices.items()
        if option != base.get(key) and key not in (*NOT_OURS, *OVERLAYS)
    }
    lines = [f"  - override {key}: {_written(option)}" for key, option in chosen.items()]
    return ["defaults:", "  - base", *lines, "  - _self_"]


def _written(option: Any) -> str:
    return f"[{', '.join(map(str, option))}]" if isinstance(option, list) else str(option)


def _values(composed: Composed) -> dict[str, Any]:
    ours = {key: node for key, node in composed.config.items() if key not in NOT_OURS}
    return _said(storable(ours, composed.sources), composed.sources)


def _said(node: Mapping[str, Any], sources: Mapping[str, str], path: str = "") -> dict[str, Any]:
    """What of a mapping has to be repeated."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping) and value:
            if below := _said(value, sources, f"{where}."):
                found[key] = below
        elif sources.get(where, "").startswith(SET):
            found[key] = value
    return found


def check(path: Path, meant: Composed) -> None:
    """Before anything is measured. ConfigError if a recipe that says this cannot be written there."""
    if (names := _beside(meant)) and path.parent.resolve() not in meant.catalog.extra:
        what = f"a recipe there does not find {', '.join(names)}, which lies beside yours."
        hint = f"Try: -o {meant.catalog.extra[0] / path.name}"
        raise ConfigError([Problem(str(path), what, hint)])
    with _tried(path, text(meant, ()), meant):
        pass


def write(path: Path, content: str, meant: Composed) -> None:
    """Whole or not at all, and only if it says what was meant. ConfigError if the file is there."""
    with _tried(path, content, meant) as unfinished:
        unfinished.replace(path)


def _beside(meant: Composed) -> list[str]:
    """Options beside the recipe that are chosen, or named in a list of parts (`drafter.order`)."""
    catalog = meant.catalog
    used = [(ALWAYS, name) for name in catalog.options(ALWAYS)]
    for key, option in meant.choices.items():
        group, _, package = key.partition("@")
        if group not in (*NOT_OURS, *OVERLAYS):
            listed = [
                v for _, v in leaves(meant.config.get(package or group)) if isinstance(v, list)
            ]
            used += [(group, str(name)) for name in chain(_list(option), *listed)]
    return [
        f"{group}={name}"
        for group, name in dict.fromkeys(used)
        if (file := catalog.options(group).get(name)) and not file.is_relative_to(catalog.conf)
    ]


def _list(option: Any) -> list[Any]:
    return option if isinstance(option, list) else [option]


@contextmanager
def _tried(path: Path, content: str, meant: Composed) -> Iterator[Path]:
    """A file beside `path`, for as long as the block runs, that was read and says what was meant."""
    if os.path.exists(path):  # False, too, of names that no file can have
        raise ConfigError([Problem(str(path), "is there already.", "Take another name: -o FILE")])
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.yaml")
    try:
        unfinished.write_text(content, encoding="utf-8")
        _same(meant, compose(str(unfinished)))
        yield unfinished
    except OSError as error:
        what = f"cannot be written: {error.strerror}."
        raise ConfigError([Problem(str(path), what, "Take another: -o FILE")]) from error
    finally:
        with suppress(OSError):  # it may never have been there
            unfinished.unlink()


def _same(meant: Composed, fresh: Composed) -> None:
    wanted, said = (storable(one.config, one.sources) for one in (meant, fresh))
    for group, value in wanted.items():
        if group not in NOT_OURS and said.get(group) != value:
            what = f"{group} would not be what was tuned: {said.get(group)} for {value}"
            raise AssertionError(what)
