"""From a plan to parts and stages: the only place that makes objects from YAML.

Each object is made once; then the graph is checked. Nothing is opened, with one exception: to run,
the device is opened before any other stages module is imported, since what it loads must be there
before mlx is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.catalog import load_yaml
from pipeline.compose import Composed, compose
from pipeline.errors import ConfigError, Problem
from pipeline.graph import Graph, Node, Offer
from pipeline.plan import Plan, Spec, plan, resolve, source


def pipeline_to_run(
    recipe: str,
    overrides: Sequence[str] = (),
    allow: Iterable[str] = (),
    without: Sequence[str] = (),
) -> Pipeline:
    """Compose, plan and build in the order that running needs: the device first."""
    composed = compose(recipe, overrides, without)
    return build(plan(composed, allow=allow, first=open_device))


def open_device(spec: Spec) -> Any:
    """Make the device and let it load what must be there before mlx is imported."""
    device = _made(spec, [])
    device.open()
    return device


@dataclass
class Pipeline:
    """A built pipeline: what the engine runs. `open` and `close` are called on its owner thread."""

    parts: dict[str, Any]
    stages: dict[str, Any]
    phases: dict[str, list[str]]
    settings: dict[str, Any]
    choices: Mapping[str, Any]
    config: Mapping[str, Any]
    graph: Graph
    composed: Composed
    _opened: list[Any] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        """Everything that is opened, in order: parts by group, then stages."""
        for part in self.parts.values():
            yield from part if isinstance(part, list) else [part]
        yield from self.stages.values()

    def open(self) -> None:
        """Open everything; if one fails, what is open is closed and the error goes on."""
        try:
            for part in self:
                if opening := getattr(part, "open", None):
                    self._opened.append(part)
                    opening()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close in reverse order, each even if another failed; then raise the first failure."""
        failures = []
        while self._opened:
            try:
                getattr(self._opened.pop(), "close", lambda: None)()
            except Exception as error:
                failures.append(error)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"and then: {other!r}")
            raise failures[0]


def build(planned: Plan) -> Pipeline:
    """Make every object and check the graph. GraphError lists what does not fit."""
    maker = _Maker(planned)
    parts = {group: maker.part(group) for group in planned.parts}
    used = list(dict.fromkeys(name for names in planned.phases.values() for name in names))
    stages = {name: maker.make(planned.stages[name]) for name in used}
    settings = {group: maker.make(spec) for group, spec in planned.settings.items()}
    if problems := [*maker.problems, *_unsent(planned.composed, settings.get("telemetry"))]:
        raise ConfigError(problems)
    graph = _graph(planned, parts, stages)
    graph.check(lambda group, abilities: _able(planned, group, abilities))
    phases = {phase: list(names) for phase, names in planned.phases.items()}
    composed = planned.composed
    told = composed.choices, planned.config, graph, composed
    return Pipeline(parts, stages, phases, settings, *told)


class _Maker:
    """Makes each part once, its own parts first."""

    def __init__(self, planned: Plan):
        self.specs = planned.parts
        self.made: dict[str, Any] = dict(planned.made)
        self.problems: list[Problem] = []
        self._making: list[str] = []

    def part(self, group: str) -> Any:
        if group not in self.made:
            assert group not in self._making, f"parts need each other: {self._making}"
            self._making.append(group)
            spec = self.specs[group]
            made = [self.make(s) for s in spec] if isinstance(spec, list) else self.make(spec)
            self.made[group] = made
            self._making.pop()
        return self.made[group]

    def make(self, spec: Any) -> Any:
        if isinstance(spec, list):
            return [self.make(item) for item in spec]
        arguments = [self._argument(spec, *item) for item in spec.signature.parts.items()]
        try:
            return _made(spec, arguments)
        except ConfigError as error:
            self.problems += error.problems

    def _argument(self, spec: Spec, name: str, annotation: Any) -> Any:
        if name in spec.nested:
            return self.make(spec.nested[name])
        group = source(name, annotation)
        assert group is not None
        return self.part(group)


def _misuse(spec: Spec, error: ValueError) -> list[Problem]:
    """What a constructor refuses; lines that begin with settings' names are put under these."""
    parts = [line.partition(": ") for line in str(error).splitlines()]
    if all(colon and key in spec.signature.settings for key, colon, _ in parts):
        return [Problem(f"{spec.path}.{key}", what) for key, _, what in parts]
    return [Problem(spec.path, str(error))]


def _made(spec: Spec, arguments: Sequence[Any]) -> Any:
    """Call the class that the plan has vetted; ConfigError for what it refuses. (Hydra's
    `instantiate` would look it up again by name, follow any `_target_` inside a setting, and copy
    the parts.)"""
    try:
        return spec.target(*arguments, **spec.settings)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(_misuse(spec, error)) from error


def _graph(planned: Plan, parts: Mapping[str, Any], stages: Mapping[str, Any]) -> Graph:
    composed = planned.composed
    nodes = {
        name: Node.of(name, stage, _groups(planned.stages[name])) for name, stage in stages.items()
    }
    offers = {group: _offer(part, composed.choice(group)[1]) for group, part in parts.items()}
    return Graph(planned.phases, nodes, offers)


def _groups(spec: Spec) -> list[str]:
    filled = [source(name, kind) for name, kind in spec.signature.parts.items()]
    return [group for group in filled if group]


def _unsent(composed: Composed, telemetry: Any) -> Iterator[Problem]:
    """What is said of spans where none are sent. A recipe's may stay when they are typed away."""
    sources = composed.sources
    typed = (composed.chosen_by.get("telemetry"), sources.get("telemetry.spans"))
    for name in ("endpoint", "content"):
        where = f"telemetry.{name}"
        meant = sources.get(where) == "command line" or "command line" not in typed
        if telemetry and not telemetry.spans and getattr(telemetry, name) and meant:
            what = "does nothing where no spans are sent."
            yield Problem(where, what, "Add telemetry=otel")


def _offer(part: Any, chosen: Any) -> Offer:
    """What a group's part can do, of this option; of several parts, what any of them can."""
    name = ",".join(map(str, chosen)) if isinstance(chosen, list) else str(chosen or "")
    members = part if isinstance(part, list) else [part]
    can = [frozenset(member.can) for member in members]
    needs = {g: a for member in members for g, a in getattr(member, "needs", {}).items()}
    detail = "".join(f"({d})" for member in members if (d := getattr(member, "detail", "")))
    return Offer((name or "none") + detail, frozenset().union(*can), needs, isinstance(part, list))


def _able(planned: Plan, group: str, abilities: Iterable[str]) -> list[str]:
    """Options of a group whose class says that it can all this."""
    found = []
    for name, path in planned.composed.options(group).items():
        try:
            content = load_yaml(path)
            node = content.get(name, content)  # options of a list stand under their names
            can = getattr(resolve(node["_target_"], ("stages",)), "can", ())
            if set(abilities) <= set(can):
                found.append(name)
        except (ConfigError, KeyError, TypeError):
            continue
    return found
