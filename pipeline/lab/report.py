"""One page of a sweep, complete in itself: plots, a table of all points, and how to repeat each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError
from pipeline.identity import digest
from pipeline.lab import charts
from pipeline.lab.charts import Line, Spot
from pipeline.lab.experiment import Experiment, plain
from pipeline.lab.folder import write
from pipeline.lab.jobs import OK
from pipeline.lab.metrics import METRICS
from pipeline.lab.sweep import Row
from pipeline.lab.table import counted
from pipeline.lab.tables import (
    as_csv,
    as_json,
    heading,
    median,
    repeat,
    short,
    short_word,
    shown,
    with_unit,
)

KINDS = ("speed", "memory", "quality")  # what is weighed against each other
FEW = 2  # rounds of a width that say what it costs
MOST = 8  # lines of one chart
SMALL = 0.015  # of the time: stages below it are drawn as one
OF = "workload."  # its settings
APART = ("drafter", "depth", "draft_model", "workload")  # no part of what a pass costs


@dataclass(frozen=True)
class Chart:
    """A drawing, what it shows in one sentence, and how to read it."""

    svg: str
    title: str
    text: str


def needs() -> None:
    """OpenError if what draws the report is not installed: to be asked before anything is measured."""
    try:
        import matplotlib  # noqa: F401
        import textalloc  # noqa: F401
    except ImportError as error:
        raise OpenError(f"the report: {error}. Try: pip install 'headrace[lab]'") from error


def publish(
    folder: Path, experiment: Experiment, rows: Sequence[Row], about: Mapping[str, Any]
) -> None:
    """Write results.csv, results.json and report.html: all are made before the first is written."""
    made = {
        "results.csv": as_csv(experiment, rows),
        "results.json": as_json(experiment, rows, about),
        "report.html": as_html(experiment, rows, about),
    }
    for name, text in made.items():
        write(folder / name, text)


def as_html(experiment: Experiment, rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    from jinja2 import Environment

    template = (resources.files("pipeline.lab") / "report.html").read_text("utf-8")
    good = [row for row in rows if row.status == OK]
    measured = machines(good)
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        experiment=experiment,
        title=experiment.title,
        about=about,
        rows=rows,
        good=good,
        machines=measured,
        apart=len({(one["cpu"], one["cores"], one["system"]) for one, _ in measured}) > 1,
        known=sorted(row.when for row in good if row.known),
        scored=sorted({row.contestant.get("quality_tokens", 0) for row in good} - {0}),
        best=list(best(experiment, good)),
        sections=[(title, list(made)) for title, made in _sections(experiment, good)],
        metrics=[(name, heading(name)) for name in experiment.metrics],
        cell=cell,
        spread=spread,
        counted=counted,
        repeat=lambda row: repeat(experiment, row),
    )


def _sections(experiment: Experiment, rows: Sequence[Row]) -> Iterator[tuple[str, Iterator[Chart]]]:
    if not rows:
        return
    yield "What is gained, and what it costs", pareto(experiment, rows)
    yield "How often drafts are right", acceptance(rows)
    yield "What a wider pass costs", widths(rows)
    yield "Where the time goes", stages(rows)


def machines(rows: Sequence[Row]) -> list[tuple[dict[str, Any], list[int]]]:
    """What measured, and which points: those of a cluster may be of different machines."""
    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for row in rows:
        one = {**row.result["machine"], "blas": row.contestant.get("blas"), "date": ""}
        found.setdefault(digest(one), (one, []))[1].append(row.number)
    return list(found.values())


def by_workload(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Figures of one workload say nothing about another's: each has plots of its own. One that is asked
    otherwise (`workload.temperature=0,0.8`) is another."""
    told = Counter(text for row in rows for text in row.overrides)
    found: dict[str, list[Row]] = {}
    for row in rows:
        own = [text for text in row.overrides if told[text] < len(rows)]
        asked = [plain(text).removeprefix(OF) for text in own if text.startswith(OF)]
        found.setdefault(", ".join([row.workload, *asked]), []).append(row)
    return found


def axes(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """The first metric of each kind that these points have, and of the experiment."""
    given = [name for name in experiment.metrics if any(row.figure(name) for row in rows)]
    firsts = [[name for name in given if METRICS[name].kind == kind][:1] for kind in KINDS]
    return [name for names in firsts for name in names]


def best(experiment: Experiment, rows: Sequence[Row]) -> Iterator[str]:
    """In words: who is first in what."""
    groups = by_workload(rows)
    for workload, some in groups.items():
        said = []
        for name in axes(experiment, some):
            of = [(value, row) for row in some if (value := median(row, name)) is not None]
            if len({value for value, _ in of}) > 1:
                pick = max if METRICS[name].better == "more" else min
                value, row = pick(of, key=lambda pair: pair[0])
                said.append(f"{METRICS[name].title}: {short(row.own)}, {with_unit(name, value)}")
        if said:
            where = f"{workload}: best " if len(groups) > 1 else "Best "
            yield f"{where}{'; '.join(said)}."


def pareto(experiment: Experiment, rows: Sequence[Row]) -> Iterator[Chart]:
    for workload, some in by_workload(rows).items():
        for x, y in combinations(axes(experiment, some), 2):
            spots = front(some, x, y)
            if len({spot.x for spot in spots}) < 2 or len({spot.y for spot in spots}) < 2:
                continue  # nothing to weigh
            title = f"workload={workload}"
            drawn = charts.scatter(spots, _axis(x), _axis(y), title)
            corner = f"{_corner(y, 'top', 'bottom')} {_corner(x, 'right', 'left')}"
            text = f"Best is {corner}. No other point beats a filled one in both."
            what = f"{METRICS[y].title} against {METRICS[x].title}, {title}"
            yield Chart(drawn, what[0].upper() + what[1:], text)


def _axis(name: str) -> str:
    return f"{heading(name)}, {METRICS[name].better} is better"


def _corner(name: str, more: str, less: str) -> str:
    return more if METRICS[name].better == "more" else less


def front(rows: Sequence[Row], x: str, y: str) -> list[Spot]:
    """All points that have both figures; `best` if none is at least as good in both and better in one."""
    values = [(row, median(row, x), median(row, y)) for row in rows]
    given = [(row, a, b) for row, a, b in values if a is not None and b is not None]
    signs = [1 if METRICS[name].better == "more" else -1 for name in (x, y)]

    def beaten(a: float, b: float) -> bool:
        better = [((c - a) * signs[0], (d - b) * signs[1]) for _, c, d in given]
        return any(one >= 0 and other >= 0 and one + other > 0 for one, other in better)

    return [Spot(short(row.own), a, b, not beaten(a, b)) for row, a, b in given]


def acceptance(rows: Sequence[Row]) -> Iterator[Chart]:
    for workload, some in by_workload(rows).items():
        drawn = [Line(short(row.own), *_accepted(row)) for row in some]
        drawn = [line for line in drawn if line.xs]
        for at in range(0, len(drawn), MOST):
            part, title = drawn[at : at + MOST], f"workload={workload}"
            made = charts.lines(part, "position in the proposal", "% accepted", title, most=102)
            text = "Of the proposals that reached a position, how many were right up to it."
            yield Chart(made, f"Acceptance by position, {title}", text)


def _accepted(row: Row) -> tuple[list[float], list[float]]:
    """Positions from 1 that at least `FEW` proposals reached, and percent of them that were right."""
    one = row.contestant
    pairs = enumerate(zip(one["accepted_by_position"], one["drafted_by_position"], strict=True), 1)
    found = [(at, 100 * right / made) for at, (right, made) in pairs if made >= FEW]
    return [at for at, _ in found], [share for _, share in found]


def widths(rows: Sequence[Row]) -> Iterator[Chart]:
    """A line for all points that differ in who drafts and how deep, and in nothing else."""
    for workload, some in by_workload(rows).items():
        drawn = [Line(name, *_costs(seen)) for name, seen in _passes(some).items()]
        drawn = [line for line in drawn if len(line.xs) > 1]
        for at in range(0, len(drawn), MOST):
            part, title = drawn[at : at + MOST], f"workload={workload}"
            made = charts.lines(part, "tokens verified a row", "ms a round", title)
            text = (
                "A round without the drafter's own time. Width 1 is plain decoding; drafting pays where "
                "more tokens are accepted than a wider pass costs."
            )
            yield Chart(made, f"Milliseconds of a round by verify width, {title}", text)


def _passes(rows: Sequence[Row]) -> dict[str, dict[int, list[float]]]:
    """What runs them -> width -> rounds and seconds."""
    found: dict[str, dict[int, list[float]]] = {}
    where = _places(rows)
    for row in (row for row in rows if not row.reason):  # measured itself
        for entry in row.contestant["widths"]:
            seen = found.setdefault(f"{_runs(row, entry['rows'])}{where[row.number]}", {})
            told = seen.setdefault(entry["width"], [0, 0])
            told[0] += entry["rounds"]
            told[1] += entry["seconds"]
    return found


def _places(rows: Sequence[Row]) -> dict[int, str]:
    """By a point's number, what tells its machine, and what ran there, from the others'."""
    told = {row.number: _place(row) for row in rows}
    said = dict.fromkeys(told, "")
    for key in _place(rows[0]):
        finer = {number: f"{text}, {told[number][key]}" for number, text in said.items()}
        if len(set(finer.values())) > len(set(said.values())):
            said = finer
    return said


def _place(row: Row) -> dict[str, str]:
    """BLAS threads are not in it: where they differ they are a point's own."""
    one = row.result["machine"]
    found = {"cpu": one["cpu"], "cores": f"{one['cores']} cores", "system": one["system"]}
    packages = {name: f"{name} {number}" for name, number in one["packages"].items()}
    return {**found, **packages, "BLAS": str(row.contestant.get("blas"))}


def _runs(row: Row, rows: int) -> str:
    own = [word for word in row.own if re.split("[.=]", word)[0] not in APART]
    name = " ".join(map(short_word, own)) or f"kv {row.contestant['choices']['kv']}"
    return f"{name}, {counted(rows, 'row')}"


def _costs(seen: Mapping[int, Sequence[float]]) -> tuple[list[float], list[float]]:
    """Widths of at least `FEW` rounds, and milliseconds of one."""
    known = sorted((width, 1e3 * s / n) for width, (n, s) in seen.items() if n >= FEW)
    return [width for width, _ in known], [ms for _, ms in known]


def stages(rows: Sequence[Row]) -> Iterator[Chart]:
    kept = _large(rows)
    for workload, some in by_workload(rows).items():
        told = [(row, spent) for row in some if (spent := _per_token(row))]
        if not told:
            continue
        parts = {name: [spent.get(name, 0.0) for _, spent in told] for name in kept}
        others = [sum(s for n, s in spent.items() if n not in kept) for _, spent in told]
        whole = sum(sum(spent.values()) for _, spent in told)
        parts |= {"others": others} if sum(others) > SMALL * whole else {}
        labels, title = [short(row.own) for row, _ in told], f"workload={workload}"
        made = charts.bars(labels, parts, "ms a token of the answers", title)
        text = "Time of each stage, prompts included, divided by the tokens that were answered."
        yield Chart(made, f"Time per stage, {title}", text)


def _large(rows: Sequence[Row]) -> list[str]:
    """Stages that take a part of the time that can be seen; the same colours in every drawing."""
    told = Counter[str]()
    for row in rows:
        told.update(_per_token(row))
    whole = sum(told.values())
    return [name for name, spent in told.most_common(MOST - 1) if spent >= SMALL * whole]


def _per_token(row: Row) -> dict[str, float]:
    """Milliseconds of each stage for a token of the answers."""
    figure = row.figure("completion_tokens")
    tokens = sum(figure["samples"]) if figure else 0
    seconds: Mapping[str, float] = row.contestant["stage_seconds"]
    return {name: 1e3 * spent / tokens for name, spent in seconds.items()} if tokens else {}


def cell(row: Row, metric: str) -> str:
    return shown(metric, median(row, metric))


def spread(row: Row, metric: str) -> str:
    """Lowest and highest of several passes, where they differ as they are shown."""
    figure = row.figure(metric)
    if figure is None or len(figure["samples"]) < 2:
        return ""
    low, high = shown(metric, figure["low"]), shown(metric, figure["high"])
    return f"{low} – {high}" if low != high else ""
