"""What a point chooses, and which settings that takes: constructors say it, as for `headrace check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.catalog import Catalog, join_defaults, load_yaml, package_folder
from pipeline.compose import listed, read
from pipeline.errors import ConfigError
from pipeline.plan import PARTS, allowed, members, resolve
from pipeline.signature import signature

Case = tuple[str, ...]  # overrides that go together


def is_setting(key: str) -> bool:
    """Else one chooses an option with it."""
    return "." in key


def key_of(text: str) -> str:
    """As it is looked for: `model@draft_model` may also be typed `draft_model`."""
    key = text.partition("=")[0].strip().lstrip("~+")
    return key if is_setting(key) else key.rpartition("@")[2]


def names(text: str) -> tuple[str, ...]:
    """The options that `group=…` chooses: `[ram]` is `ram`, and `none` is nothing."""
    value, typed = read(text.partition("=")[2])
    several = value if isinstance(value, list) else [value if typed is None else typed]
    return tuple(str(name) for name in several if name != "none")


class Options:
    """Those of a recipe's groups."""

    def __init__(self, path: Path, body: Mapping[str, Any], allow: Sequence[str]):
        self._catalog = Catalog(package_folder("conf"), (path.parent,))
        base = self._catalog.base_choices()
        own = join_defaults(body.get("defaults"))
        said = {key.removeprefix("override ").strip().lstrip("/"): own[key] for key in own}
        usual = {**base, **said}
        self._folders = {key_of(key): key.partition("@")[0] for key in base}
        self._usual = {key_of(key): names(f"={listed(usual[key])}") for key in usual}
        self._allowed = allowed(allow)
        self._takes = cache(self._takes_it)

    def chosen(self, said: Sequence[str], group: str) -> tuple[str, ...]:
        """By the overrides, else by the recipe."""
        found = [names(text) for text in said if key_of(text) == group]
        return found[-1] if found else self._usual.get(group, ())

    def take(self, said: Sequence[str], key: str) -> bool:
        """Whether what is chosen takes the setting. What is no option is refused in other words."""
        group, *path = key.split(".")
        if group not in PARTS:
            return True
        return any(self._takes(group, name, *path[:2]) for name in self.chosen(said, group))

    def _takes_it(self, group: str, name: str, first: str, second: str = "") -> bool:
        try:
            node = load_yaml(self._catalog.options(self._folders[group])[name])
            if name in node:  # an option of a list stands under its name
                return first == name and self._has(node[name], second)
            return self._has(node, first)
        except (ConfigError, KeyError, TypeError):
            return True

    def _has(self, node: Mapping[str, Any], key: str) -> bool:
        takes = signature(resolve(node["_target_"], self._allowed))
        within = [group for kind in takes.parts.values() if (group := members(kind))]
        below = [name for group in within for name in self._catalog.options(group)]
        return key in ("", "_target_", *takes.settings, *takes.parts, *below)
