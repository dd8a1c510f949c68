"""A recipe and overrides become one plain dict. Hydra joins the options; values are set here.

In this order, whatever was typed first: base.yaml, the chosen options, the recipe's own values,
the overlays (`tuning`, `debug`), then the command line's values. Every problem on the way is
collected and in our words. Nothing is imported from `stages` and no value is judged here:
`build.plan` does that, with the constructors, and reports its problems together with these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from pipeline.catalog import (
    ALWAYS,
    SWEEP,
    Catalog,
    find_recipe,
    join_defaults,
    load_yaml,
    package_folder,
)
from pipeline.environment import counted, reads
from pipeline.errors import ConfigError, Problem, nearest
from pipeline.overrides import Choice, Override, Removal, Value, choice_problem, parse

OVERLAYS = ("tuning", "debug")
# Hydra's own options (logging, launchers): unused when composing, and half of its time.
_UNUSED = "env help hydra_help hydra_logging job_logging launcher output sweeper"
UNUSED = tuple(f"~hydra/{name}" for name in _UNUSED.split())
ENCLOSED = re.compile(r"""(?s)(['"]).*?\1|\[.*\]|\{.*\}""")  # where a comma parts no values

OmegaConf.register_new_resolver("oc.env", counted(oc.env), replace=True)


@dataclass(frozen=True)
class Composed:
    """What the YAML and the command line say together, before anything is imported."""

    recipe: str
    config: Mapping[str, Any]  # plain data, references and environment resolved
    choices: Mapping[str, Any]  # group[@package] -> option, or list of options
    texts: Mapping[str, str]  # path -> what was typed or found in the environment there
    sources: Mapping[str, str]  # path -> where its value comes from
    catalog: Catalog
    problems: tuple[Problem, ...] = ()
    chosen_by: Mapping[str, str] = field(default_factory=dict)  # as `choices`, who; not base's

    def choice(self, group: str) -> tuple[str, Any]:
        """The group whose options may be chosen there, and what is: for `draft_model` one of `model`'s."""
        for key, chosen in self.choices.items():
            folder, _, package = key.partition("@")
            if group == (package or folder):
                return folder, chosen
        return group, None

    def options(self, group: str) -> dict[str, Path]:
        """Those that `group` may be, with their files."""
        return self.catalog.options(self.choice(group)[0])


@dataclass
class _Draft:
    """A composition in the making."""

    catalog: Catalog
    problems: list[Problem] = field(default_factory=list)
    choices: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    chosen_by: dict[str, str] = field(default_factory=dict)

    def composed(self, recipe: str, config: Mapping[str, Any]) -> Composed:
        said = self.choices, self.texts, self.sources
        return Composed(recipe, config, *said, self.catalog, tuple(self.problems), self.chosen_by)


def compose(
    recipe: str | None, overrides: Sequence[str] = (), without: Sequence[str] = ()
) -> Composed:
    """Compose a recipe (bare name or path; None: base alone), less what it sets in the groups `without`.
    Only an unreadable recipe raises."""
    path = find_recipe(recipe) if recipe else None
    conf = package_folder("conf")
    draft = _Draft(Catalog(conf, (path.parent,) if path else ()))
    base = draft.catalog.base_choices()
    body = load_recipe(path) if path else {}
    chosen = _recipe_choices(body, path, base, draft)
    draft.choices = {**base, **chosen}
    draft.chosen_by |= dict.fromkeys(chosen, f"recipe {path and path.stem}")
    parsed = parse(overrides, [*base, ALWAYS, *draft.catalog.nested_groups()], read)
    _choose(parsed, base, draft)
    tree = _join_options(draft)
    known = [str(key) for key in tree]
    values = {k: v for k, v in body.items() if k not in ("defaults", SWEEP, *without)}
    _lay(tree, values, f"recipe {path and path.stem}", draft)
    _lay_overlays(tree, draft)
    _set_values(tree, parsed, draft)
    _refuse_unknown(tree, known, draft)
    config = {str(key): _resolved(tree, key, str(key), draft) for key in tree}
    return draft.composed(path.stem if path else "base", config)


def recompose(
    recipe: str, config: Mapping[str, Any], choices: Mapping[str, Any], overrides: Sequence[str]
) -> Composed:
    """A configuration that was resolved before (a lock's), with values set over it. No option is joined:
    choosing another one is a problem."""
    draft = _Draft(Catalog(package_folder("conf")), choices=dict(choices))
    draft.chosen_by |= dict.fromkeys(choices, f"lock {recipe}")
    tree = OmegaConf.create(dict(config))
    known = [str(key) for key in tree]
    parsed = parse(overrides, [*choices, ALWAYS], read)
    for item in parsed:
        if isinstance(item, Problem):
            draft.problems.append(item)
        elif isinstance(item, Choice):
            what = "a lock's options are settled."
            draft.problems.append(
                Problem(item.key, what, "Choose it in the recipe, and lock that.")
            )
    _set_values(tree, parsed, draft)
    _refuse_unknown(tree, known, draft)
    resolved = {str(key): _resolved(tree, key, str(key), draft) for key in tree}
    return draft.composed(recipe, resolved)


def literal(text: str) -> str:
    """The text as OmegaConf must be given it so that no `${` in it is followed."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def read(raw: str) -> tuple[Any, str | None]:
    """A typed value by Hydra's grammar, and the text itself where a text may still be wanted."""
    try:
        override = OverridesParser.create().parse_override(f"k={raw}")
        value = raw if override.is_sweep_override() else override.value()
    except (HydraException, ValueError):
        return raw, raw
    quoted = isinstance(override._value, QuotedString)
    if quoted and isinstance(value, str) and "${" in value:  # literal: OmegaConf would follow it
        return literal(value), None
    if quoted or isinstance(value, list | dict) or (isinstance(value, str) and "${" in value):
        return value, None
    return value, raw


def sweep_values(raw: str) -> list[str]:
    """The values of a sweep in Hydra's grammar (`a,b`, `choice(a,b)`, `range(1,9,2)`, lists of lists);
    what is no sweep is one value, as typed. ValueError for one that cannot be read, or has no values, or
    no end."""
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(f"k={raw}")
        if not override.is_sweep_override():
            return [raw]
        single = override.is_discrete_sweep()
        found = list(override.sweep_string_iterator()) if single else []
    except (HydraException, ValueError) as error:
        function = raw.partition("(")[0].strip() in parser.functions.functions
        if function or "," in ENCLOSED.sub("", raw):
            raise ValueError(f"{raw} cannot be read as a sweep. {_SWEEPS}") from error
        return [raw]
    if not single:
        raise ValueError(f"{raw} names no single values. Write a list, choice(…) or range(…)")
    if not found:
        raise ValueError(f"{raw} has no values: a range goes up to its end. Try: range(1,5)")
    return found


_SWEEPS = "Type 2,4 or choice(2,4) or range(1,9,2); one value that has a comma is quoted: 'a,b'"


def load_recipe(path: Path) -> dict[str, Any]:
    """ConfigError if it is none."""
    body = load_yaml(path)
    if path.name.endswith(".lock.yaml"):
        hint = "Try: headrace serve, replay or diff with it; bench or sweep its recipe."
        raise ConfigError([Problem(str(path), "is a lock, not a recipe.", hint)])
    if not isinstance(body, dict):
        raise ConfigError([Problem(str(path), "a recipe is a YAML mapping.", _EXAMPLE)])
    defaults = body.get("defaults") or []
    if not isinstance(defaults, list) or "base" not in defaults:
        raise ConfigError([Problem(str(path), "a recipe extends base.", _EXAMPLE)])
    return body


_EXAMPLE = "Begin it with:  defaults: [base, override model: smollm2, _self_]"


def _recipe_choices(
    body: Mapping[str, Any], path: Path | None, base: Mapping[str, Any], draft: _Draft
) -> dict[str, Any]:
    """The recipe's `override group: option` lines that are right; the others become problems."""
    chosen: dict[str, Any] = {}
    others = [
        e for e in body.get("defaults", []) if isinstance(e, str) and e not in ("base", "_self_")
    ]
    for entry in others:
        text = f"'{entry}': a recipe extends base only, with lines 'override GROUP: OPTION'."
        draft.problems.append(Problem(f"{path} defaults", text))
    for key, option in join_defaults(body.get("defaults")).items():
        words = key.removeprefix("override ").strip().lstrip("/")
        if problem := choice_problem(words, option, base, draft.catalog):
            draft.problems.append(problem)
        elif not key.startswith("override "):
            draft.problems.append(
                Problem(
                    f"{path} defaults",
                    f"'{key}' needs the word override.",
                    f"Write: override {key}: {option}",
                )
            )
        else:
            chosen[words] = option
    return chosen


def _choose(parsed: Sequence[Override | Problem], base: Mapping[str, Any], draft: _Draft) -> None:
    """Take over the command line's choices of options."""
    for item in parsed:
        if isinstance(item, Problem):
            draft.problems.append(item)
        elif isinstance(item, Choice):
            if problem := choice_problem(item.key, item.option, base, draft.catalog):
                draft.problems.append(problem)
            else:
                draft.choices[item.key] = item.option
                draft.chosen_by[item.key] = "command line"


def _join_options(draft: _Draft) -> DictConfig:
    """Base and all chosen options, by Hydra; then every stage's settings."""
    base = draft.catalog.base_choices()
    lines = [f"{k}={listed(v)}" for k, v in draft.choices.items() if v != base.get(k)]
    if extra := draft.catalog.adds_options():
        lines.append(f"hydra.searchpath=[{','.join(map(_quoted_url, extra))}]")
    before = Singleton.get_state()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(draft.catalog.conf), version_base="1.3"):
            tree = hydra_compose("base", [*lines, *UNUSED])
    except Exception as error:  # whatever Hydra has to say about an option file
        raise ConfigError([*draft.problems, Problem("conf", _first_lines(error))]) from error
    finally:
        Singleton.set_state(before)
    OmegaConf.set_struct(tree, False)
    files = draft.catalog.options(ALWAYS).values()
    tree[ALWAYS].merge_with({k: v for path in files for k, v in (load_yaml(path) or {}).items()})
    return tree


def _quoted_url(folder: Path) -> str:
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'file://{text}'"


def listed(option: Any) -> str:
    """As it is typed after `group=`."""
    return (
        f"[{','.join(map(str, option or ['none']))}]" if isinstance(option, list) else str(option)
    )


def _first_lines(error: BaseException) -> str:
    """A library's message without its advice (`use +key`), its links and its picture of the stack."""
    kept = [line.strip() for line in str(error).splitlines() if line.strip()]
    dull = ("full_key:", "object_type=", "To append", "See ", "Set the env")
    return " ".join(line for line in kept if not line.startswith(dull)) or type(error).__name__


def _lay(tree: DictConfig, values: Any, source: str, draft: _Draft) -> None:
    """Merge plain values over the tree, remembering where each leaf came from."""
    try:
        tree.merge_with(OmegaConf.create(values))
    except (OmegaConfBaseException, ValueError) as error:
        draft.problems.append(Problem(source, _first_lines(error)))
    for path, _ in leaves(values):
        draft.sources[path] = source


def _lay_overlays(tree: DictConfig, draft: _Draft) -> None:
    """Overlays win over the recipe: Hydra merged them with base, so they are laid once more."""
    for group in OVERLAYS:
        option = draft.choices.get(group, "none")
        values = load_yaml(draft.catalog.options(group)[option]) or {}
        _lay(tree, values, f"{group}={option}", draft)


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of all that is not a mapping with something in it."""
    if not isinstance(values, Mapping) or (path and not values):
        yield path, values
        return
    for key, value in values.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def _set_values(tree: DictConfig, parsed: Sequence[Override | Problem], draft: _Draft) -> None:
    """The command line's values, known keys or not: `build.plan` judges them by constructor."""
    for item in parsed:
        if isinstance(item, Value):
            _set(tree, item, draft)
        elif isinstance(item, Removal):
            _remove(tree, item.path, draft)


def _set(tree: DictConfig, item: Value, draft: _Draft) -> None:
    parent = item.path.rpartition(".")[0]
    try:
        node = OmegaConf.select(tree, parent) if parent else tree
        if node is not None and not isinstance(node, DictConfig | ListConfig):
            raise ValueError(f"{parent} is a value, not a group of settings.")
        OmegaConf.update(tree, item.path, item.value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, IndexError, TypeError) as error:
        draft.problems.append(Problem(item.path, _first_lines(error)))
        return
    for path, _ in leaves(item.value, item.path):
        draft.sources[path] = "command line"
    if item.text is not None:
        draft.texts[item.path] = item.text


def _remove(tree: DictConfig, path: str, draft: _Draft) -> None:
    parent, _, key = path.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if not parent or not isinstance(node, DictConfig) or key not in node:
        known = [str(k) for k in node] if isinstance(node, DictConfig) else []
        what = "there is nothing of this name to take away."
        draft.problems.append(Problem(f"~{path}", what, nearest(key, known)))
        return
    del node[key]


def _refuse_unknown(tree: DictConfig, known: Sequence[str], draft: _Draft) -> None:
    """Only base's keys stand at the top; others are reported and left out."""
    for key in [str(key) for key in tree if key not in known]:
        if key in OVERLAYS:
            what = "is an overlay of other groups' values: it has no settings of its own."
            draft.problems.append(Problem(key, what, f"Choose one: headrace list {key}"))
            del tree[key]
            continue
        hint = f"{nearest(key, known)} Groups: {', '.join(known)}."
        draft.problems.append(Problem(key, "no such group or setting.", hint.strip()))
        del tree[key]


def _resolved(node: Any, key: Any, path: str, draft: _Draft) -> Any:
    if OmegaConf.is_missing(node, key):
        draft.problems.append(Problem(path, "must be set.", f"Add {path}=VALUE"))
        return "???"
    raw = node._get_node(key)
    reference = raw._value() if OmegaConf.is_interpolation(node, key) else None
    before = reads()
    try:
        value = node[key]
    except OmegaConfBaseException as error:
        draft.problems.append(Problem(path, _bad_reference(str(reference), error)))
        return "???"
    if reference and reads() > before:
        draft.sources[path] = f"environment {reference}"
        if isinstance(value, str):
            draft.texts[path] = value
    if isinstance(value, DictConfig):
        if reference and "_target_" in value:
            what = (
                f"{reference} is a whole part; parts are shared by constructors, not by reference."
            )
            draft.problems.append(Problem(path, what))
        return {k: _resolved(value, k, f"{path}.{k!s}", draft) for k in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, i, f"{path}.{i}", draft) for i in range(len(value))]
    return value


def _bad_reference(reference: str, error: Exception) -> str:
    if unset := re.search(r"Environment variable '(\w+)' not found", str(error)):
        name = unset[1]
        return (
            f"the environment has no {name}. Set it, or give a default: ${{oc.env:{name},DEFAULT}}"
        )
    return f"{reference} leads nowhere: {_first_lines(error)}."
