"""One or two contestants under one workload: warm-up, repeats by turns, medians and ratios."""

from __future__ import annotations

import itertools
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from pipeline.lab.contestants import Contestant, Field
from pipeline.lab.driving import Pass, drive
from pipeline.lab.figures import median_interval
from pipeline.lab.lines import Bench
from pipeline.lab.metrics import METRICS, figures, totals
from pipeline.lab.sides import Side, prepare
from pipeline.lab.table import machine
from pipeline.lab.workload import Arrival, Workload

FORMAT = 1
WARM = -1  # the turn of the warm-up
Say = Callable[[str, int, int], None]  # what, done, of


def silent(what: str, done: int, of: int) -> None:
    """Says nothing."""


def warm_up(workload: Workload) -> list[Arrival]:
    """A few requests like those of a pass, at once; of a file all, since every pass asks them again."""
    asked = workload.arrivals(WARM)
    return asked if workload.path else asked[: max(2, workload.clients)]


def measure(
    sides: Sequence[Side], workload: Workload, repeats: int, say: Say = silent
) -> list[list[Pass]]:
    """Each side's passes, in processes of their own and by turns, as `Bench.compare` has it: the
    servers are started in both orders, once a half. BenchError if one does not start or answer."""
    for side in sides:
        prepare(side)
    starts = min(len(sides), repeats, 2)
    done, of = itertools.count(), len(sides) * (repeats + starts)

    def warm(one: Contestant) -> None:
        say(f"{one.name}: warms up", next(done), of)
        drive(one, warm_up(workload), workload.clients)

    def ask(one: Contestant, turn: int) -> Pass:
        say(f"{one.name}: pass {turn + 1} of {repeats}", next(done), of)
        return drive(one, workload.arrivals(turn), workload.clients)

    say(f"{sides[0].name}: starts", 0, of)
    commands = {side.name: side.command for side in sides}
    with Field(commands, {side.name: side.threads for side in sides}) as field:
        bench = Bench(field, sides[0].threads, repeats, say=lambda text: None)
        rounds = bench.compare("passes", [side.name for side in sides], ask, warm)
    say("done", of, of)
    return [list(passes) for passes in zip(*rounds, strict=True)]


def result(sides: Sequence[Side], passes: Sequence[Sequence[Pass]]) -> dict[str, Any]:
    """All that was measured, and with what: what `result.json` holds."""
    contestants = [_contestant(side, own) for side, own in zip(sides, passes, strict=True)]
    found: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(sides[0].threads),
        "versions": versions(),
        "workload": (sides[0].config or {}).get("workload"),
        "repeats": len(passes[0]),
        "contestants": contestants,
    }
    if len(sides) == 2:
        found["comparison"] = compare(*contestants)
        found["same_answers"] = same_answers(*passes)
    return found


def _contestant(side: Side, passes: Sequence[Pass]) -> dict[str, Any]:
    """Choices, configuration and BLAS are null for a rival."""
    answers = [reply.text for reply in passes[0].replies]
    return {
        "name": side.name,
        "recipe": side.recipe,
        "overrides": list(side.overrides),
        "choices": side.choices,
        "config": side.config,
        "threads": side.threads,
        "blas": passes[0].blas or None,
        "figures": figures(passes),
        **totals(passes),
        "answers": answers,
    }


def versions() -> dict[str, str]:
    """Every installed package, since any of them may be why two results differ."""
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Metric -> median of the pairs' ratios ours / theirs, and its 90 % interval where enough pairs
    say so."""
    found: dict[str, Any] = {}
    for name, figure in ours["figures"].items():
        other = theirs["figures"].get(name, {}).get("samples", ())
        pairs = list(zip(figure["samples"], other, strict=False))
        if (
            METRICS[name].better
            and len(pairs) == len(figure["samples"])
            and all(b for _, b in pairs)
        ):
            ratios = [a / b for a, b in pairs]
            found[name] = {"ratio": statistics.median(ratios)}
            if interval := median_interval(ratios):
                found[name]["interval"] = list(interval)
    return found


def same_answers(ours: Sequence[Pass], theirs: Sequence[Pass]) -> list[int]:
    """How many answers are the same text, of how many. (mlx-lm drops a leading space.)"""
    pairs = [
        (a.text.lstrip(), b.text.lstrip())
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one.replies, other.replies, strict=True)
        if not (a.left or b.left)
    ]
    return [sum(a == b for a, b in pairs), len(pairs)]
