"""`headrace bench RECIPE [key=value …] [--against RECIPE|mlx_lm|mlx_lm_blas] [--repeats N] [--out FOLDER]`."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cli.arguments import add_recipe, count
from pipeline.errors import HeadraceError
from pipeline.types.places import user_path

if TYPE_CHECKING:
    from pipeline.lab.sides import Checked, Side


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="measure by turns with it: mlx_lm (its server as installed), mlx_lm_blas (given our BLAS), "
        "or a recipe, with overrides in the same quotes: 'smollm2 kv=kv4'",
    )
    parser.add_argument(
        "--repeats", type=count, default=5, metavar="N", help="measured passes of the workload (5)"
    )
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FOLDER",
        help="a new folder for result.json (runs/bench/…)",
    )


def run(args: Namespace) -> int:
    """0 if it was measured; what cannot start or answer is said as its server said it."""
    from pipeline.lab.children import end_in_order
    from pipeline.lab.folder import own, write
    from pipeline.lab.sides import Checked, against

    end_in_order()
    ours = Checked.of(args.recipe, args.overrides, args.allow_code)
    theirs = None if args.against is None else against(args.against, ours)
    started = time.strftime("%Y%m%d-%H%M%S")
    folder = args.out or Path("runs") / "bench" / f"{ours.name}-{started}"
    with own(folder, {"kind": "bench", "of": ours.name}, again=False):
        found = {"command": _command(args), **measured(ours, theirs, args.repeats)}
        write(folder / "result.json", json.dumps(found, indent=1))
    _print(found)
    print(f"{folder / 'result.json'}")
    return 0


def measured(ours: Checked, theirs: Checked | str | None, repeats: int) -> dict[str, Any]:
    """The result of one or two contestants, with a progress bar on the terminal."""
    from pipeline.cli.progress import bar
    from pipeline.lab.comparison import measure, result
    from pipeline.lab.sse import BenchError

    with tempfile.TemporaryDirectory(prefix="headrace-") as place, bar() as say:
        sides = _sides(ours, theirs, Path(place))
        try:
            passes = measure(sides, ours.workload, repeats, say)
        except BenchError as error:
            if error.code in (None, 2):
                raise HeadraceError(str(error)) from error
            raise
    return result(sides, passes)


def _sides(ours: Checked, theirs: Checked | str | None, place: Path) -> list[Side]:
    from pipeline.lab.sides import rival

    sides = [ours.side(ours.name, place)]
    if isinstance(theirs, str):
        sides.append(rival(theirs, ours, place))
    elif theirs is not None:
        name = theirs.name if theirs.name != ours.name else f"{theirs.name} (against)"
        sides.append(theirs.side(name, place))
    return sides


def _command(args: Namespace) -> str:
    from pipeline.secrets import command, typed, words

    more = ["--against", words(args.against)] if args.against else []
    more += ["--repeats", str(args.repeats)]
    return command("bench", args.recipe, typed(args.overrides), args.allow_code, more)


def _print(found: Mapping[str, Any]) -> None:
    from pipeline.cli.progress import out
    from pipeline.lab.figures import FEWEST

    console = out()
    contestants = found["contestants"]
    console.print(_figures(contestants, found.get("comparison", {}), found["repeats"]))
    for one in contestants:
        if lines := _more(one):
            console.print("\n".join([f"{one['name']}:", *lines]), highlight=False, soft_wrap=True)
    if "same_answers" in found:
        same, of = found["same_answers"]
        console.print(f"the same text in {same} of {of} answers", highlight=False)
        if found["repeats"] < FEWEST:
            told = f"too few pairs for an interval: --repeats {FEWEST}"
            console.print(told, highlight=False)


def _figures(
    contestants: Sequence[Mapping[str, Any]], ratios: Mapping[str, Any], repeats: int
) -> Any:
    """Median, lowest and highest of each metric, and the ratio of two contestants."""
    from rich.table import Table

    from pipeline.lab.metrics import METRICS
    from pipeline.lab.table import counted
    from pipeline.lab.tables import heading, shown

    title = f"median of {counted(repeats, 'pass', 'passes')} (lowest to highest)"
    table = Table("", *[one["name"] for one in contestants], title=title, title_justify="left")
    if ratios:
        given = any("interval" in found for found in ratios.values())
        table.add_column("ratio [90 %]" if given else "ratio")
    for name in METRICS:
        figures = [one["figures"].get(name) for one in contestants]
        if not any(figures):
            continue
        cells = [_cell(name, figure, shown) for figure in figures]
        if ratios:
            cells.append(_ratio(ratios.get(name)))
        table.add_row(heading(name), *cells)
    return table


def _cell(name: str, figure: Mapping[str, Any] | None, shown: Any) -> str:
    if figure is None:
        return "–"
    middle, low, high = (shown(name, figure[key]) for key in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    interval = " [{:.2f}, {:.2f}]".format(*found["interval"]) if "interval" in found else ""
    return f"{found['ratio']:.2f}{interval}"


def _more(one: Mapping[str, Any]) -> list[str]:
    """Acceptance by position and the time of each stage, where it tells them."""
    lines = []
    if drafted := one["drafted_by_position"]:
        pairs = zip(one["accepted_by_position"], drafted, strict=True)
        shares = " ".join(f"{a / d:.0%}" for a, d in pairs if d)
        lines.append(f"  accepted by position: {shares}")
    seconds = one["stage_seconds"]
    whole = sum(seconds.values())
    spent = sorted(((s, n) for n, s in seconds.items() if s >= 0.01 * whole), reverse=True)
    if whole:
        lines.append("  time: " + ", ".join(f"{name} {s / whole:.0%}" for s, name in spent))
    return lines
