"""What is on disk: groups, their options, and recipes. Knows YAML files, not what they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError, Problem, nearest
from pipeline.types.places import user_path

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where PyYAML has it
SWEEP = "sweep"  # a recipe's part for `headrace sweep`: no setting of the pipeline
ALWAYS = "stage"  # the one group nobody chooses from: every file in it is loaded


def package_folder(name: str) -> Path:
    """Folder of a data package (`conf`, `recipes`), from a checkout or an installed wheel."""
    spec = find_spec(name)
    assert spec and spec.origin, f"{name} is not installed"
    return Path(spec.origin).parent


def load_yaml(path: Path) -> Any:
    """The file's plain data; ConfigError with the line for bad YAML, repeated keys included."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from None


def read_yaml(text: str, where: str) -> Any:
    """As `load_yaml`, of a text that was found at `where`."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError([Problem(where, f"not valid YAML: {error}")]) from None


def dump_yaml(value: Any) -> str:
    """Plain data as YAML that `load_yaml` reads back as it was; lists of plain values on one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=None,
    )


class _UniqueKeys(_Loader):
    """PyYAML lets the last of two equal keys win in silence; a recipe must not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                text = f"the key {key!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, text, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `load_yaml` would take for numbers, and never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1 reads 1e-3 as text and 2026-01-01 as a date: numbers are numbers here, dates are text.
_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for first, found in _UniqueKeys.yaml_implicit_resolvers.items()
}
for _class in (_UniqueKeys, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def first_comment(path: Path) -> str:
    """The first comment line that is prose: what `list` prints beside an option."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").strip()
        if text and not text.startswith("@"):
            return text
    return ""


def join_defaults(entries: Any) -> dict[str, Any]:
    """A defaults list's choices, `group[@package] -> option`, without `_self_` and plain names."""
    pairs = (
        item for entry in entries or [] if isinstance(entry, Mapping) for item in entry.items()
    )
    return {str(key): value for key, value in pairs}


@dataclass(frozen=True)
class Catalog:
    """Groups are the folders of `conf`; `extra` folders may add options to them, not groups."""

    conf: Path
    extra: tuple[Path, ...] = ()

    def groups(self) -> tuple[str, ...]:
        """Names as typed: `kv`, and `kv/codec` for a choice inside an option."""
        found = {
            path.parent.relative_to(self.conf).as_posix() for path in self.conf.rglob("*.yaml")
        }
        return tuple(sorted(found - {"."}))

    def nested_groups(self) -> tuple[str, ...]:
        """Choices inside an option: folders below a group's folder."""
        return tuple(name for name in self.groups() if "/" in name)

    def options(self, group: str) -> dict[str, Path]:
        """Option name -> file; a file of `conf` wins over one of the same name elsewhere."""
        folders = [folder / group for folder in (*self.extra, self.conf)]
        files = {file.stem: file for folder in folders for file in folder.glob("*.yaml")}
        return dict(sorted(files.items()))

    def base_choices(self) -> dict[str, Any]:
        """What base.yaml chooses: `group[@package] -> option or list of options`."""
        return join_defaults(load_yaml(self.conf / "base.yaml").get("defaults"))

    def adds_options(self) -> tuple[Path, ...]:
        """Those extra folders that really hold option files."""
        groups = self.groups()
        return tuple(f for f in self.extra if any(any((f / g).glob("*.yaml")) for g in groups))


def recipes(root: Path | None = None) -> dict[str, list[Path]]:
    """Bare name -> recipe files of that name, below `recipes/`."""
    folder = root or package_folder("recipes")
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        found.setdefault(path.stem, []).append(path)
    return found


def find_recipe(name: str) -> Path:
    """A recipe by bare name, by `folder/name` below recipes/, or by the path of anybody's file."""
    known = recipes()
    looks_like_path = name.endswith((".yaml", ".yml")) or "/" in name or name.startswith("~")
    for path in (user_path(name), package_folder("recipes") / f"{name}.yaml"):
        if looks_like_path and path.is_file():
            return path.resolve()
    if looks_like_path:
        what = f"no such recipe file (looked in {Path.cwd()} and in recipes/)."
        raise ConfigError([Problem(name, what, nearest(Path(name).stem, known))])
    matches = known.get(name, [])
    if len(matches) == 1:
        return matches[0]
    if matches:
        paths = ", ".join(f"{path.parent.name}/{path.stem}" for path in matches)
        raise ConfigError(
            [Problem(name, f"several recipes have this name: {paths}.", "Type one of these.")]
        )
    hint = f"{nearest(name, known)} Recipes: {', '.join(known)}. A file of your own is named by its path."
    raise ConfigError([Problem(name, "no such recipe.", hint.strip())])
