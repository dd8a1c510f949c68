"""The bench's header and table, in plain text that fits a README."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.lab.figures import Figure

PACKAGES = ("headrace", "mlx", "mlx-lm", "numpy", "scipy-openblas32")


def machine(threads: int) -> dict[str, Any]:
    """Where and when this was measured, and with what."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "blas_threads": threads,
        "packages": {name: version(name) for name in PACKAGES},
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def header(facts: Mapping[str, Any], pairs: int) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return (
        f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, {facts['system']}\n"
        f"{packages}; BLAS threads of every contestant: {facts['blas_threads']}\n"
        f"SmolLM2-135M float32; medians of at most {pairs} alternating pairs [90 % interval] of how many; "
        f"absolute figures are the best of {pairs}"
    )


def counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def cells(figure: Figure) -> tuple[str, ...]:
    interval = f"of {len(figure.samples)}" if figure.samples else ""
    if figure.interval:
        low, high = map(number, figure.interval)
        interval = f"[{low}, {high}] {interval}"
    unit = f" {figure.unit}" if figure.unit else ""
    verdict = "met" if figure.met else "NOT MET"
    return (
        figure.name, figure.title, number(figure.value) + unit, interval,
        str(figure.promise) + unit, verdict, figure.note,
    )  # fmt: skip


def row(figure: Figure) -> str:
    return "  ".join(cell for cell in cells(figure) if cell)


def table(figures: Sequence[Figure], failures: Mapping[str, str], seconds: float) -> str:
    """A Markdown table, so that a README can hold it as it is printed."""
    rows = [("line", "what", "figure", "90 %", "promise", "", "note"), *map(cells, figures)]
    lines = markdown(rows)
    lines += [f"NOT MEASURED {name}: {error}" for name, error in failures.items()]
    missed = len(failures) + sum(not figure.met for figure in figures)
    verdict = f"{missed} NOT MET" if missed else "every line met"
    return "\n".join(["", *lines, "", f"{verdict}, in {seconds / 60:.1f} minutes"])


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines of a Markdown table; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, one, widths)) + " |" for one in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
