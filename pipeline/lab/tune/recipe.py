"""A recipe that says what was composed: choices that differ from base, and values that were set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.catalog import dump_yaml
from pipeline.compose import Composed, compose
from pipeline.errors import ConfigError, Problem
from pipeline.secrets import ENVIRONMENT, storable

NOT_OURS = ("workload",)  # how it was measured is not what is served
SET = ("recipe ", "command line", ENVIRONMENT)  # sources of values that a recipe has to repeat


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
        if option != base.get(key) and key not in NOT_OURS
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


def write(path: Path, content: str, meant: Composed) -> None:
    """Whole or not at all, and only if it says what was meant. ConfigError if the file is there."""
    if path.exists():
        raise ConfigError([Problem(str(path), "is there already.", "Take another name: -o FILE")])
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.yaml")
    try:
        unfinished.write_text(content, encoding="utf-8")
        fresh = compose(str(unfinished))
        wanted, said = (storable(one.config, one.sources) for one in (meant, fresh))
        for group, value in wanted.items():
            if group not in NOT_OURS and said.get(group) != value:
                what = f"{group} would not be what was tuned: {said.get(group)} for {value}"
                raise AssertionError(what)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
