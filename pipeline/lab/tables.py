"""A sweep's rows as a terminal table, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.lab.experiment import Experiment, keys, label, plain
from pipeline.lab.jobs import OK
from pipeline.lab.metrics import METRICS
from pipeline.lab.options import key_of
from pipeline.lab.sweep import Row
from pipeline.secrets import command


def shown(metric: str, value: float | None) -> str:
    """A figure with its unit's usual precision; a dash where there is none."""
    if value is None:
        return "–"
    unit = METRICS[metric].unit
    if unit == "%":
        return f"{100 * value:.0f}"
    if metric == "kl":
        return f"{value:.2g}"
    if unit in ("MB", "B") or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) < 10 else f"{value:.1f}"


def with_unit(metric: str, value: float | None) -> str:
    unit = METRICS[metric].unit
    space = "" if unit in ("%", "/s") else " "
    return f"{shown(metric, value)}{space}{unit}".strip() if value is not None else "–"


def heading(metric: str) -> str:
    unit = METRICS[metric].unit
    return f"{METRICS[metric].title} ({unit})" if unit else METRICS[metric].title


def median(row: Row, metric: str) -> float | None:
    figure = row.figure(metric)
    return None if figure is None else float(figure["median"])


def short(own: Sequence[str]) -> str:
    """A point's name in a plot or a table: its options and values without what their keys repeat."""
    words = [word for word in own if not word.startswith("workload=")]
    return " ".join(map(short_word, words)) or label(own)


def short_word(word: str) -> str:
    key, _, value = plain(word).partition("=")
    return f"{key.rpartition('.')[2]} {value}" if "." in key else value or key


def repeat(experiment: Experiment, row: Row) -> list[str]:
    """Commands that measure this point again, and its quality where it was asked for."""
    asked: dict[str, tuple[object, ...]] = {"bench": ("--repeats", experiment.repeats)}
    if experiment.quality_tokens:
        asked["quality"] = (*_policy(row), "--tokens", experiment.quality_tokens)
    return [
        command(verb, experiment.recipe, row.overrides, experiment.allow, more)
        for verb, more in asked.items()
    ]


def _policy(row: Row) -> tuple[str, ...]:
    """Where nobody chose native, `headrace quality` without this measures every policy."""
    return ("--kv", "native") if row.kv == "kv=native" and "kv=native" not in row.overrides else ()


def as_csv(experiment: Experiment, rows: Sequence[Row]) -> str:
    """A line a point: what it is, how it went, median, lowest and highest of every metric, and what it
    says of each key that is varied."""
    text = io.StringIO()
    names = [
        name
        for name in METRICS
        if name in experiment.metrics or any(row.figure(name) for row in rows)
    ]
    columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    out = csv.writer(text, lineterminator="\n")
    told = ["number", "point", "workload", "status", "reason", "known", "when"]
    varied = [key for key in keys(row.own for row in rows) if key not in told]
    out.writerow([*told, *varied, *columns, "repeat"])
    for row in rows:
        figures = [row.figure(name) or {} for name in names]
        values = [one.get(key) for one in figures for key in ("median", "low", "high")]
        said = [row.number, row.label, row.workload, row.status, row.reason, row.known, row.when]
        says = {key_of(text): plain(text).partition("=")[2] for text in row.overrides}
        settings = [says.get(key, "") for key in varied]
        out.writerow([*said, *settings, *values, "; ".join(repeat(experiment, row))])
    return text.getvalue()


def as_json(experiment: Experiment, rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    points = [
        {"label": row.label, **asdict(row), "repeat": repeat(experiment, row)} for row in rows
    ]
    whole = {
        "experiment": experiment.name, "goal": experiment.goal, "recipe": experiment.recipe,
        "metrics": experiment.metrics, "repeats": experiment.repeats,
        "quality_tokens": experiment.quality_tokens, **about, "points": points,
    }  # fmt: skip
    return json.dumps(whole, indent=1)


def as_table(experiment: Experiment, rows: Sequence[Row]) -> Any:
    """Rich's table of the metrics that were asked for."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(experiment.title), title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("point", overflow="fold", min_width=12)
    several = len({row.workload for row in rows if row.workload}) > 1
    if several:
        table.add_column("workload")
    for name in experiment.metrics:
        table.add_column(heading(name), justify="right")
    table.add_column("")
    for row in rows:
        values = [shown(name, median(row, name)) for name in experiment.metrics]
        known = f"known, of {row.when}" if row.known else ""
        said = "; ".join(filter(None, (known, row.reason)))
        note = said if row.status == OK else f"failed: {row.reason}"
        told = [short(row.own), row.workload] if several else [short(row.own)]
        table.add_row(str(row.number), *map(escape, told), *values, escape(note))
    return table
