"""From a plain dict to a plan: every key judged by the constructor that takes it.

All problems are reported at once, those of composing included. Classes are imported, nothing is
made; a `_target_` outside the allowed prefixes is not even imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin

from pipeline import types as protocols
from pipeline.catalog import load_yaml
from pipeline.errors import ConfigError, Problem, nearest
from pipeline.graph import PHASES
from pipeline.signature import MISSING, MisfitError, Signature, fit, signature, wanted

if TYPE_CHECKING:
    from pipeline.compose import Composed

# Groups that make parts, in the order they are opened. The first of a protocol is the one meant by
# a parameter of another name; other groups of it are asked for by parameter name.
PARTS: Mapping[str, Any] = {
    "device": protocols.Device,
    "model": protocols.Target,
    "draft_model": protocols.Target,
    "adapters": protocols.Adapters,
    "kv": protocols.KVPolicy,
    "tier": list[protocols.Tier],
    "constraint": protocols.Constraint,
    "sampler": protocols.Sampler,
    "rule": protocols.Rule,
    "depth": protocols.Depth,
    "drafter": protocols.Drafter,
    "scheduler": protocols.Scheduler,
    "limits": protocols.Limits,
}
# Groups of plain settings, and the class of the engine that takes them.
SETTINGS: Mapping[str, str] = {
    "server": "pipeline.server.settings.ServerSettings",
    "telemetry": "pipeline.trace.Telemetry",
    "workload": "pipeline.lab.workload.Workload",
}
ALLOW_CODE = "HEADRACE_ALLOW_CODE"
UNSET = "???"


@dataclass(frozen=True)
class Spec:
    """One object to be made: its class, checked settings, and parts nested inside its own node."""

    path: str
    target: Any  # the class
    signature: Signature
    settings: Mapping[str, Any]
    nested: Mapping[str, Any] = field(default_factory=dict)  # parameter -> Spec or list of Spec


@dataclass(frozen=True)
class Plan:
    """A configuration in which every key is known and every value fits."""

    composed: Composed
    config: Mapping[str, Any]  # as composed, with the final types
    parts: Mapping[str, Any]  # group -> Spec, or list of Spec for a multi-select group
    stages: Mapping[str, Spec]
    phases: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Spec]
    made: Mapping[str, Any] = field(default_factory=dict)  # the device, if it had to be first


def allowed(allow: Iterable[str]) -> list[str]:
    """Prefixes of the classes that may run: ours, those asked for, and the environment's."""
    prefixes = ["stages", *allow, *re.split(r"[\s,]+", os.environ.get(ALLOW_CODE, ""))]
    return [prefix.rstrip(".") for prefix in prefixes if prefix.strip(".")]


def plan(
    composed: Composed, *, allow: Iterable[str] = (), first: Callable[[Spec], Any] | None = None
) -> Plan:
    """Check the whole configuration; ConfigError lists all problems, compose's included. `first`
    is called with the device's Spec before any other stages module is imported."""
    check = _Check(composed, allowed(allow))
    config = composed.config
    device = check.part("device", config.get("device"))
    ready = first is not None and isinstance(device, Spec) and not check.problems
    made = {"device": first(device)} if first and ready else {}
    parts = {"device": device}
    parts |= {g: check.part(g, config[g]) for g in PARTS if g in config and g != "device"}
    stages = check.stages(config.get("stage") or {}, config.get("flow") or {})
    found = {group: check.settings(group, config.get(group)) for group in SETTINGS}
    settings = {group: spec for group, spec in found.items() if spec}
    phases = check.phases(config.get("flow") or {})
    check.parameters(everything := {**parts, **{f"stage.{n}": spec for n, spec in stages.items()}})
    check.idle(composed, everything)
    if check.problems:
        raise ConfigError(check.problems)
    return Plan(composed, check.typed, parts, stages, phases, settings, made)


class _Check:
    """Collects problems while turning nodes into specs."""

    def __init__(self, composed: Composed, allowed: Sequence[str]):
        self.problems = list(composed.problems)
        self.composed, self.texts, self.allowed = composed, composed.texts, allowed
        self.typed = _copy(composed.config)
        self.catalog = composed.catalog
        self.known_stages = tuple(self.catalog.options("stage"))
        self._touched = {problem.where for problem in composed.problems}

    def _problem(self, where: str, what: str, hint: str = "") -> None:
        self.problems.append(Problem(where, what, hint.strip()))

    def part(self, group: str, node: Any) -> Any:
        """The group's Spec; a list of them where each option sits under a key of its own."""
        if get_origin(PARTS.get(group)) is list:
            named = node if isinstance(node, Mapping) else {}
            return [self.spec(f"{group}.{key}", value) for key, value in named.items()]
        return self.spec(group, node)

    def settings(self, group: str, node: Any) -> Spec | None:
        """A group without `_target_`: its class is the engine's own."""
        found = self.spec(group, {**(node or {}), "_target_": SETTINGS[group]}, ("pipeline",))
        if found and "_target_" in (node or {}):
            self._unknown(f"{group}._target_", "_target_", found.signature)
        return found

    def stages(self, nodes: Mapping[str, Any], flow: Mapping[str, Any]) -> dict[str, Spec]:
        """Every stage in the flow, and every stage that has settings: those are judged too."""
        named = [name for names in flow.values() if isinstance(names, list) for name in names]
        found = {}
        for name in dict.fromkeys([*map(str, named), *nodes]):
            node = {"_target_": f"stages.{name}.{_camel(name)}", **(nodes.get(name) or {})}
            if "_target_" not in (nodes.get(name) or {}) and not _module_exists(f"stages.{name}"):
                phase = next((p for p, names in flow.items() if name in (names or ())), None)
                where = f"flow.{phase}" if phase else f"stage.{name}"
                self._problem(where, f"no stage named '{name}'.", nearest(name, self.known_stages))
            elif spec := self.spec(f"stage.{name}", node):
                found[name] = spec
        return found

    def phases(self, flow: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        found = {}
        for phase, names in flow.items():
            if phase not in PHASES:
                self._problem(
                    f"flow.{phase}",
                    "no such phase.",
                    f"{nearest(phase, PHASES)} Phases: {', '.join(PHASES)}.",
                )
            elif not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                self._problem(f"flow.{phase}", "wants a list of stage names.")
            else:
                found[phase] = tuple(names)
        return found

    def spec(self, path: str, node: Any, allowed: Sequence[str] = ()) -> Spec | None:
        """Judge one node by its class's constructor."""
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            if path not in self._touched:
                self._problem(
                    path, "names no class (_target_).", f"Try: headrace list {path.split('.')[0]}"
                )
            return None
        try:
            target = resolve(node["_target_"], allowed or self.allowed)
        except ConfigError as error:
            self.problems += [Problem(f"{path}{p.where}", p.what, p.hint) for p in error.problems]
            return None
        takes = signature(target)
        lists = {k: g for k, kind in takes.parts.items() if k in node and (g := members(kind))}
        own = {name for key in lists for name in _names(node[key])}
        settings = self._settings(path, {k: v for k, v in node.items() if k not in own}, takes)
        nested = {
            key: self._listed(path, key, node, lists[key])
            if key in lists
            else self._nested(f"{path}.{key}", node[key])
            for key in takes.parts
            if key in node
        }
        return Spec(path, target, takes, settings, nested)

    def _listed(self, path: str, key: str, node: Mapping[str, Any], group: str) -> Any:
        """Parts chosen by a list of a group's options (`order: [ngram, suffix]`). What stands under an
        option's name beside the list is laid over the option's file."""
        if isinstance(node[key], Mapping):
            return self._nested(f"{path}.{key}", node[key])
        options = self.catalog.options(group)
        names = _names(node[key])
        if not names:
            hint = f"Name one or more of {', '.join(options)}."
            self._problem(f"{path}.{key}", f"wants a list of options of {group}.", hint)
        wrong = [name for name in names if name not in options or names.count(name) > 1]
        for name in dict.fromkeys(wrong):
            what = "is there twice." if name in options else f"is no option of {group}."
            known = f"{nearest(name, options)} Options: {', '.join(options)}."
            self._problem(f"{path}.{key}", f"'{name}' {what}", "" if name in options else known)
        return [] if wrong else [self._member(path, name, node, options[name]) for name in names]

    def _member(self, path: str, name: str, node: Mapping[str, Any], file: Path) -> Spec | None:
        where, laid = f"{path}.{name}", node.get(name) or {}
        if not isinstance(laid, Mapping):
            self._problem(where, "wants settings by name.", f"Type {where}.SETTING=VALUE")
            return None
        whole = {**load_yaml(file), **laid}
        for key in [key for key, value in whole.items() if value == UNSET]:
            self._problem(f"{where}.{key}", "must be set.", f"Add {where}.{key}=VALUE")
            del whole[key]
        _put(self.typed, where, dict(whole))
        return self.spec(where, whole)

    def _nested(self, path: str, node: Any) -> Any:
        if isinstance(node, Mapping) and "_target_" not in node:
            return [self.spec(f"{path}.{key}", value) for key, value in node.items()]
        return self.spec(path, node)

    def _settings(self, path: str, node: Mapping[str, Any], takes: Signature) -> dict[str, Any]:
        found = {}
        for key, value in node.items():
            where = f"{path}.{key}"
            if key in takes.settings:
                found[key] = self._fitted(where, value, takes.settings[key].annotation)
            elif key != "_target_" and key not in takes.parts:
                self._unknown(where, key, takes)
        for key, setting in takes.settings.items():
            if setting.default is MISSING and key not in node:
                where = f"{path}.{key}"
                self._problem(
                    where, f"must be set: wants {wanted(setting.annotation)}.", f"Add {where}=VALUE"
                )
        return found

    def _unknown(self, where: str, key: str, takes: Signature) -> None:
        known = list(takes.settings)
        groups = {part: group for part, kind in takes.parts.items() if (group := members(kind))}
        for part, group in groups.items():
            if key in self.catalog.options(group):
                what = f"'{key}' is not in the list {part}, so it has nothing to set."
                self._problem(where, what, f"Put it there: {where.rpartition('.')[0]}.{part}=[…]")
                return
        path = where.rpartition(".")[0]
        hint = nearest(key, known, f"{path}.") or self._elsewhere(path, key)
        names = f"It takes: {', '.join(known)}." if known else "It has no settings."
        self._problem(where, f"{self._named(path)} takes no '{key}'.", f"{hint} {names}")

    def _named(self, path: str) -> str:
        """A node as it is typed: with its option, unless somebody has set another class."""
        chosen = self.composed.choice(path)[1]
        own = f"{path}._target_" in self.composed.sources
        return f"{path}={chosen}" if isinstance(chosen, str) and not own else path

    def _elsewhere(self, group: str, key: str) -> str:
        """Options that take this key instead."""
        files = self.composed.options(group)
        found = [f"{group}={name}" for name, file in files.items() if key in _option(file)]
        return f"Choose what takes it: {', '.join(found)}." if found else ""

    def _fitted(self, where: str, value: Any, annotation: Any) -> Any:
        if value == UNSET and where in self._touched:
            return value
        try:
            fitted = fit(value, annotation, self.texts.get(where))
        except MisfitError as error:
            self._problem(where, str(error))
            return value
        _put(self.typed, where, fitted)
        return fitted

    def idle(self, composed: Composed, specs: Mapping[str, Any]) -> None:
        """A second model that nobody asks would be loaded for nothing."""
        users = [spec for group, spec in specs.items() if group != "limits"]  # limits only bill it
        takes = [spec.signature.parts.items() for spec in _flat(users)]
        asked = {source(*part) for parts in takes for part in parts}
        choice = composed.choice("draft_model")[1] or "none"
        if choice != "none" and "draft_model" not in asked:
            what = f"no part asks for a second model, so draft_model={choice} would do nothing."
            self._problem("draft_model", what, "Choose a drafter that uses one, or leave it out.")

    def parameters(self, specs: Mapping[str, Any]) -> None:
        """Every positional parameter of every class must have somebody to fill it."""
        for spec in _flat(specs.values()):
            for name, annotation in spec.signature.parts.items():
                if name not in spec.nested and source(name, annotation) is None:
                    what = f"wants '{name}' ({wanted(annotation)}), which no group makes."
                    self._problem(spec.path, what, f"Groups: {', '.join(PARTS)}.")


def resolve(target: str, allowed: Sequence[str]) -> type:
    """The class a `_target_` names, if it lives under an allowed prefix; else ConfigError, whose
    problem's `where` is to be put after the node's path."""
    module_name, _, name = target.rpartition(".")
    if not any(target.startswith(f"{prefix}.") for prefix in allowed):
        hint = f"If you trust that code: --allow-code {target.split('.')[0]}"
        _refuse(f"target '{target}' is outside of {', '.join(f'{p}.*' for p in allowed)}.", hint)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = _import_hint(error, module_name)
        _refuse(f"cannot import {module_name}: {error}.", hint)
    found = vars(module).get(name)
    if not isinstance(found, type) or not any(
        f"{found.__module__}.".startswith(f"{p}.") for p in allowed
    ):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        _refuse(f"{module_name} has no class '{name}'.", nearest(name, classes))
    return found


def _import_hint(error: ImportError, module_name: str) -> str:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    if not f"{module_name}.".startswith(f"{error.name}."):
        return f"Install what it needs: {error.name}"
    return "" if module_name.startswith("stages.") else "Is its folder in PYTHONPATH?"


def _refuse(what: str, hint: str) -> NoReturn:
    raise ConfigError([Problem("._target_", what, hint)])


def source(name: str, annotation: Any) -> str | None:
    """The group that fills a positional parameter: by name where two groups make its type."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    groups = [group for group, protocol in PARTS.items() if protocol == annotation]
    return name if name in groups else next(iter(groups), None)


def members(annotation: Any) -> str | None:
    """The group whose options a `list[Part]` parameter may name; None for other annotations."""
    inner = get_args(annotation)[:1] if get_origin(annotation) is list else ()
    return next((group for group, protocol in PARTS.items() if (protocol,) == inner), None)


def _names(value: Any) -> list[str]:
    """Option names of a list; [] for what is no list of words."""
    listed = isinstance(value, list | tuple)
    return [str(name) for name in value] if listed else []


def _flat(specs: Iterable[Any]) -> Iterator[Spec]:
    for spec in specs:
        if isinstance(spec, Spec):
            yield spec
            yield from _flat(spec.nested.values())
        elif isinstance(spec, list):
            yield from _flat(spec)


def _option(file: Path) -> Mapping[str, Any]:
    """An option's settings; none of a file that is no option, as one beside a recipe may be."""
    try:
        found = load_yaml(file)
    except ConfigError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, key = path.split(".")
    for parent in parents:
        tree = tree[parent]
    tree[key] = value
