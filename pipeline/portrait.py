"""What is being served, as plain data for people: the graph with what each stage does, what was chosen
and by whom, and every setting with where it comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from pipeline.catalog import ALWAYS, first_comment
from pipeline.compose import Composed, leaves
from pipeline.drawing import WHEN, as_dict
from pipeline.graph import LOOPS, Graph
from pipeline.secrets import storable


class Drawn(Protocol):
    """What a portrait needs of a built pipeline."""

    stages: dict[str, Any]
    config: Mapping[str, Any]
    graph: Graph
    composed: Composed


def portrait(built: Drawn) -> dict[str, Any]:
    """JSON-ready; secrets and values of the environment are left out as in a lock."""
    composed = built.composed
    return {
        "recipe": composed.recipe,
        "graph": _graph(built),
        "choices": [_choice(composed, key, chosen) for key, chosen in composed.choices.items()],
        "settings": list(_settings(composed, storable(built.config, composed.sources))),
    }


def _graph(built: Drawn) -> dict[str, Any]:
    graph = as_dict(built.graph)
    phases = [
        {"name": name, "when": WHEN[name], "loop": name in LOOPS, "stages": stages}
        for name, stages in graph["phases"].items()
    ]
    about = {name: _first_line(stage) for name, stage in built.stages.items()}
    return {**graph, "phases": phases, "about": about}


def _first_line(stage: Any) -> str:
    """A stage's file begins with what it is for."""
    text = sys.modules[type(stage).__module__].__doc__ or ""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _choice(composed: Composed, key: str, chosen: Any) -> dict[str, Any]:
    group, _, package = key.partition("@")
    options = composed.catalog.options(group)
    names = [str(name) for name in (chosen if isinstance(chosen, list) else [chosen])]
    about = [first_comment(options[name]) for name in names if name in options]
    by = composed.chosen_by.get(key, "base")
    return {"group": package or group, "options": names, "about": about, "by": by}


def _settings(composed: Composed, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups = {key.partition("@")[2] or key: key for key in composed.choices}
    for path, value in leaves(config):
        if not path.endswith("_target_"):
            source = composed.sources.get(path) or _option(composed, groups, path)
            yield {"path": path, "value": value, "from": source}


def _option(composed: Composed, groups: Mapping[str, str], path: str) -> str:
    """The option whose file says it: `kv=paged`."""
    group, _, rest = path.partition(".")
    if group == ALWAYS:
        return f"{ALWAYS}/{rest.partition('.')[0]}.yaml"
    chosen = composed.choices.get(groups.get(group, group), "")
    return f"{group}={rest.partition('.')[0] if isinstance(chosen, list) else chosen}"
