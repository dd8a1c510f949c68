"""The report's charts as SVG that takes its colours and its font from the page.

Drawn by matplotlib, whose text stays text. Colours are stand-ins that become CSS variables, so that
one drawing serves light, dark and print; sizes are those of a phone's width.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from pipeline.identity import digest

INK, GRID, MUTED = "#010203", "#040506", "#070809"  # stand-ins
SERIES = tuple(f"#0a0b{at:02x}" for at in range(8))
MARKS = "os^Dv<>P"
STANDS = {INK: "currentColor", GRID: "var(--grid)", MUTED: "var(--muted)"}
STANDS |= {colour: f"var(--s{at})" for at, colour in enumerate(SERIES)}
BESIDE = 40  # letters of two names in one line of a legend
NAME = 18  # letters in one line of a point's name
TITLE = 36  # and of a title
WIDTH = 4.1  # inches of 72 px: what a phone shows at nearly its size
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9, "axes.edgecolor": MUTED,
    "axes.labelcolor": INK, "axes.titlesize": 10, "axes.titlecolor": INK, "axes.titlelocation": "left",
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": GRID,
    "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": 8.5, "axes.axisbelow": True, "figure.constrained_layout.use": True,
}  # fmt: skip


@dataclass(frozen=True)
class Spot:
    """A point of a scatter plot."""

    label: str
    x: float
    y: float
    best: bool  # no other is better in both


@dataclass(frozen=True)
class Line:
    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@contextmanager
def _figure(height: float) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; closed at the end."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        FigureCanvasSVG(figure)
        yield figure, figure.subplots()


def scatter(spots: Sequence[Spot], x_title: str, y_title: str, title: str = "") -> str:
    """Each point with its name; those that no other beats in both are filled."""
    import textalloc

    with _figure(3.6) as (figure, axes):
        for best, face in ((True, SERIES[0]), (False, "none")):
            some = [spot for spot in spots if spot.best is best]
            xs, ys = [spot.x for spot in some], [spot.y for spot in some]
            axes.scatter(xs, ys, s=42, facecolors=face, edgecolors=SERIES[0], linewidths=1.4)
        front = sorted((spot.x, spot.y) for spot in spots if spot.best)
        axes.plot(*zip(*front, strict=True), color=SERIES[0], linewidth=0.8, linestyle=":")
        axes.margins(0.18, 0.14)
        axes.set(xlabel=x_title, ylabel=y_title, title=fill(title, TITLE))
        figure.draw_without_rendering()
        xs, ys = [spot.x for spot in spots], [spot.y for spot in spots]
        textalloc.allocate(
            axes, xs, ys, [fill(spot.label, NAME) for spot in spots], x_scatter=xs, y_scatter=ys, textsize=8.5,
            textcolor=INK, linecolor=MUTED, linewidth=0.6, min_distance=0.03, max_distance=0.45,
            nbr_candidates=1000, priority_strategy="largest",
        )  # fmt: skip
        return svg(figure)


def lines(
    drawn: Sequence[Line], x_title: str, y_title: str, title: str = "", *, most: float | None = None
) -> str:
    """Lines with marks, and a legend above them."""
    from matplotlib.ticker import MaxNLocator

    with _figure(3.1 + 0.17 * lines_of([line.label for line in drawn])) as (figure, axes):
        for at, line in enumerate(drawn):
            colour, mark = SERIES[at % len(SERIES)], MARKS[at % len(MARKS)]
            axes.plot(line.xs, line.ys, color=colour, marker=mark, markersize=4.5, label=line.label)
        axes.set(xlabel=x_title, ylabel=y_title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0, top=most)
        _legend(figure, axes, title)
        return svg(figure)


def bars(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], x_title: str, title: str = ""
) -> str:
    """A bar a label, made of parts; the first label on top."""
    rows = 0.17 * lines_of(list(parts))
    with _figure(0.9 + 0.26 * len(labels) + rows) as (figure, axes):
        left = [0.0] * len(labels)
        for at, (name, values) in enumerate(parts.items()):
            colour = SERIES[at] if at < len(SERIES) else MUTED
            axes.barh(range(len(labels)), values, left=left, height=0.66, color=colour, label=name)
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=x_title)
        _legend(figure, axes, title)
        return svg(figure)


def columns(labels: Sequence[str]) -> int:
    """Two where the longest names fit beside each other."""
    return 2 if sum(sorted(map(len, labels))[-2:]) <= BESIDE else 1


def lines_of(labels: Sequence[str]) -> int:
    """How many lines their legend takes."""
    return -(-len(labels) // columns(labels))


def _legend(figure: Any, axes: Any, title: str) -> None:
    """Above the axes, so that it never covers a line."""
    drawn, labels = axes.get_legend_handles_labels()
    figure.legend(
        drawn, labels, loc="outside upper left", ncols=columns(labels), title=fill(title, TITLE) or None,
        alignment="left", handlelength=1.4, columnspacing=1.2,
    )  # fmt: skip


def svg(figure: Any) -> str:
    """The figure as an element of a page: no header, no fixed size, ids that are its own."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()[text.getvalue().index("<svg") :]
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    for size in ("width", "height"):
        found = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", found, count=1)
    prefix = f"c{digest({'svg': found})[:8]}-"
    found = found.replace(' id="', f' id="{prefix}').replace("url(#", f"url(#{prefix}")
    found = found.replace('href="#', f'href="#{prefix}')
    for stand, colour in STANDS.items():
        found = found.replace(stand, colour)
    return found
