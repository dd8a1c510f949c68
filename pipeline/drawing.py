"""A graph as text for people, as Mermaid for pages, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipeline.graph import LOOPS, PHASES, Edge, Graph

THREAD_WORDS = {"prepare": "preparation pool", "owner": "owner thread", "io": "I/O thread"}
WHEN = {
    "admit": "once a request",
    "prefill": "until the prompt is in",
    "first": "token 0, where prefill scores it",
    "decode": "round after round",
    "finish": "once a request",
    "idle": "while nothing runs",
}
WIDTH = 100


def as_text(graph: Graph, title: str = "") -> str:
    """Phases down the left, stages with the parts they use, and on each arrow what a stage hands on."""
    lines = [title, ""] if title else []
    for phase in [p for p in PHASES if graph.phases.get(p)]:
        lines += _phase(graph, phase)
    return "\n".join(lines)


def _phase(graph: Graph, phase: str) -> list[str]:
    nodes = [node for p, node in graph.steps() if p == phase]
    threads = " and ".join(
        dict.fromkeys(THREAD_WORDS.get(node.thread, node.thread) for node in nodes)
    )
    loop = "↻ " if phase in LOOPS else ""
    lines = [f"{phase:<8} {loop}{WHEN[phase]}, {threads}"]
    for node in nodes:
        lines.append(f"  ● {node.name:<19}{_parts(graph, node.parts)}".rstrip())
        lines += [f"  │   {line}" for line in _wrapped(_handed(graph, phase, node.name))]
    return [*lines, ""]


def _parts(graph: Graph, groups: tuple[str, ...]) -> str:
    shown = [f"{group}={graph.offers[group].choice}" for group in groups if group in graph.offers]
    return f" [{' '.join(shown)}]" if shown else ""


def _handed(graph: Graph, phase: str, name: str) -> list[str]:
    """`field, field ─▶ stage` for each stage that reads what this one wrote."""
    by_target: dict[str, list[str]] = {}
    for edge in graph.edges():
        if edge.source == (phase, name):
            known = by_target.setdefault(edge.target[1], [])
            known += [field for field in edge.fields if field not in known]
    by_fields: dict[str, list[str]] = {}
    for target, fields in by_target.items():
        by_fields.setdefault(", ".join(fields), []).append(target)
    return [f"{fields} ─▶ {', '.join(targets)}" for fields, targets in by_fields.items()]


def _wrapped(pieces: list[str]) -> Iterator[str]:
    line = ""
    for piece in pieces:
        if line and len(line) + len(piece) + 3 > WIDTH - 6:
            yield line
            line = ""
        line = f"{line}   {piece}" if line else piece
    if line:
        yield line


def as_mermaid(graph: Graph) -> str:
    """A flowchart with one subgraph a phase and the fields on the arrows."""
    lines = ["flowchart TD"]
    for phase in [p for p in PHASES if graph.phases.get(p)]:
        lines.append(f'  subgraph {phase}["{phase}: {WHEN[phase]}"]')
        lines += [
            f"    {phase}_{node.name}[{node.name}]" for p, node in graph.steps() if p == phase
        ]
        lines.append("  end")
    lines += [_arrow(edge) for edge in graph.edges()]
    return "\n".join(lines)


def _arrow(edge: Edge) -> str:
    source, target = "_".join(edge.source), "_".join(edge.target)
    return f'  {source} -->|"{", ".join(edge.fields)}"| {target}'


def as_json(graph: Graph) -> str:
    """Phases, declarations and edges; keys and lists sorted, so that two graphs can be compared."""
    return json.dumps(as_dict(graph), indent=2)


def as_dict(graph: Graph) -> dict[str, Any]:
    phases: dict[str, list[dict[str, Any]]] = {
        phase: [] for phase in PHASES if graph.phases.get(phase)
    }
    for phase, node in graph.steps():
        entry: dict[str, Any] = {
            "stage": node.name,
            "thread": node.thread,
            "parts": list(node.parts),
        }
        entry |= {"reads": sorted(node.reads), "writes": sorted(node.writes)}
        entry["needs"] = {
            group: sorted(abilities) for group, abilities in sorted(node.needs.items())
        }
        phases[phase].append(entry)
    edges = [{"from": e.source, "to": e.target, "fields": e.fields} for e in graph.edges()]
    choices = {group: offer.choice for group, offer in graph.offers.items()}
    return {"phases": phases, "edges": edges, "choices": choices}


DRAWINGS = {"text": as_text, "mermaid": as_mermaid, "json": as_json}
