"""The report's charts as SVG that takes its colours and its font from the page.

Drawn by matplotlib, whose text stays text. Colours are stand-ins that become CSS variables, so that
one drawing serves light, dark and print; sizes are those of a phone's width.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from textwrap import wrap
from typing import Any

from rich.cells import cell_len

from pipeline.identity import digest

INK, GRID, MUTED = "#010203", "#040506", "#070809"  # stand-ins
SERIES = tuple(f"#0a0b{at:02x}" for at in range(8))
MARKS = "os^Dv<>P"
STANDS = {INK: "currentColor", GRID: "var(--grid)", MUTED: "var(--muted)"}
STANDS |= {colour: f"var(--s{at})" for at, colour in enumerate(SERIES)}
BESIDE = 40  # letters of two names in one line of a legend
NAME = 18  # letters in one line of a point's name
LONGEST = 72  # letters of a name: longer ones are shown without their middle
LINE, BAR = 0.17, 0.26  # inches of a line of text, and of a bar with its gap
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

    def under(self, later: Line, near: float) -> bool:
        """More than half of its points are hidden by those of `later`, which are as `near` in y."""
        over = dict(zip(later.xs, later.ys, strict=True))
        points = zip(self.xs, self.ys, strict=True)
        hidden = sum(abs(over.get(x, math.inf) - y) <= near for x, y in points)
        return 2 * hidden > len(self.xs)


@contextmanager
def _figure(height: float) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; closed at the end."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has others
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
        axes.set(xlabel=x_title, ylabel=y_title, title=_fill(title, TITLE))
        figure.draw_without_rendering()
        xs, ys = [spot.x for spot in spots], [spot.y for spot in spots]
        textalloc.allocate(
            axes, xs, ys, names([spot.label for spot in spots], NAME), x_scatter=xs, y_scatter=ys, textsize=8.5,
            textcolor=INK, linecolor=MUTED, linewidth=0.6, min_distance=0.03, max_distance=0.45,
            margin=0.015, nbr_candidates=1000, priority_strategy="largest",
        )  # fmt: skip
        return svg(figure)


def lines(
    drawn: Sequence[Line], x_title: str, y_title: str, title: str = "", *, most: float | None = None
) -> str:
    """Lines with marks, and a legend above them; one that others cover is wider, and seen below them."""
    from matplotlib.ticker import MaxNLocator

    legend = Legend.of([line.label for line in drawn], title)
    with _figure(2.9 + legend.height) as (figure, axes):
        plotted, near = [], 0.01 * max(y for line in drawn for y in line.ys)
        for at, line in enumerate(drawn):
            look = {"color": SERIES[at % len(SERIES)], "marker": MARKS[at % len(MARKS)]}
            wider = 1.4 * sum(line.under(later, near) for later in drawn[at + 1 :])
            axes.plot(
                line.xs, line.ys, **look, markersize=4.5 + wider, linewidth=1.5 + wider, clip_on=False,
            )  # fmt: skip
            plotted += axes.plot([], [], **look, markersize=4.5)
        axes.set(xlabel=x_title, ylabel=y_title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0, top=most)
        legend.draw(figure, plotted)
        return svg(figure)


def bars(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], x_title: str, title: str = ""
) -> str:
    """A bar a label, made of parts; the first label on top."""
    legend, told = Legend.of(list(parts), title), names(labels, NAME)
    sizes = [BAR + LINE * name.count("\n") for name in told]
    places = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    with _figure(0.7 + sum(sizes) + legend.height) as (figure, axes):
        left, drawn = [0.0] * len(labels), []
        for at, values in enumerate(parts.values()):
            colour = SERIES[at] if at < len(SERIES) else MUTED
            drawn.append(axes.barh(places, values, left=left, height=0.66 * BAR, color=colour))
            left = [a + b for a, b in zip(left, values, strict=True)]
        axes.set_yticks(places, told)
        axes.set_ylim(sum(sizes), 0)
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=x_title)
        legend.draw(figure, drawn)
        return svg(figure)


@dataclass(frozen=True)
class Legend:
    """Above the axes, so that it never covers a line."""

    names: Sequence[str]
    title: str
    columns: int  # two where the longest names fit beside each other

    @classmethod
    def of(cls, labels: Sequence[str], title: str) -> Legend:
        beside = sum(sorted(map(cell_len, labels))[-2:]) <= BESIDE
        return cls(names(labels, BESIDE), _fill(title, TITLE), 2 if beside else 1)

    @property
    def height(self) -> float:
        """Inches."""
        lines = sum(1 + name.count("\n") for name in self.names)
        return LINE * (1 + self.title.count("\n") - (-lines // self.columns))

    def draw(self, figure: Any, drawn: Sequence[Any]) -> None:
        figure.legend(
            drawn, self.names, loc="outside upper left", ncols=self.columns, title=self.title or None,
            alignment="left", handlelength=1.4, columnspacing=1.2,
        )  # fmt: skip


def names(labels: Sequence[str], width: int) -> list[str]:
    """Over lines. Long ones are without their middle, if they can still be told apart."""
    half = LONGEST // 2
    cut = [f"{label[:half]}…{label[-half:]}" if len(label) > LONGEST else label for label in labels]
    apart = len(set(cut)) == len(set(labels))
    return [_fill(label, width) for label in (cut if apart else labels)]


def _fill(text: str, width: int) -> str:
    """Over lines. Letters of double width (日) count as two."""
    wide = "".join(letter + "\0" * (cell_len(letter) - 1) for letter in text)
    return "\n".join(wrap(wide, width)).replace("\0", "")


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
