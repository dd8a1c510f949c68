"""A recipe that says what was composed: choices that differ from base, and values that were set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.catalog import dump_yaml
from pipeline.compose import Composed, compose, literal
from pipeline.errors import ConfigError, Problem

NOT_OURS = ("workload",)  # how it was measured is not what is served
ENVIRONMENT = "environment "
SET = ("recipe ", "command line", ENVIRONMENT)  # sources of values that a recipe has to repeat


def text(composed: Composed, comments: Iterable[str]) -> str:
    """The whole file, comments first."""
    lines = [f"# {line}" for line in comments]
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
    found: dict[str, Any] = {}
    for path, source in composed.sources.items():
        group = path.partition(".")[0]
        if source.startswith(SET) and group not in NOT_OURS:
            _put(found, path.split("."), _value(composed.config, path.split("."), source))
    return found


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _value(config: Mapping[str, Any], keys: Sequence[str], source: str) -> Any:
    """References to the environment stay references."""
    if source.startswith(ENVIRONMENT):
        return source.removeprefix(ENVIRONMENT)
    value: Any = config
    for key in keys:
        value = value[key]
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return literal(value) if isinstance(value, str) else value


def write(path: Path, content: str, meant: Composed) -> None:
    """Write it, and compose it again: it must say what was meant. ConfigError if the file is there."""
    if path.exists():
        raise ConfigError([Problem(str(path), "is there already.", "Take another name: -o FILE")])
    path.write_text(content, encoding="utf-8")
    fresh = compose(str(path))
    for group, value in meant.config.items():
        if group not in NOT_OURS and fresh.config.get(group) != value:
            path.unlink()
            what = f"{group} would not be what was tuned: {fresh.config.get(group)} for {value}"
            raise AssertionError(what)
