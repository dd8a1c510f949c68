"""`headrace matrix [--axes AXIS=A,B …] [--pairwise] [-o FILE]`."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from pipeline.cli.arguments import UsageError, count


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--axes", nargs="+", default=[], metavar="AXIS=A,B",
        help="drafter, kv, family, rows: only these options; without it all",
    )  # fmt: skip
    parser.add_argument(
        "--pairwise", action="store_true",
        help="fewer cells, in which every two options still meet",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=count, metavar="N", help="processes at a time; without it one a core"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the page there, as Markdown")


def run(args: Namespace) -> int:
    """0 if no cell fails, else 1. Refused cells are told, with their reasons."""
    from pipeline.lab.children import end_in_order
    from pipeline.lab.folder import write
    from pipeline.lab.matrix.cells import Axes
    from pipeline.lab.matrix.page import page, refusals, summary
    from pipeline.lab.matrix.run import run as try_all

    end_in_order()
    workers = args.workers or os.cpu_count() or 1
    place = _checked(Path(args.output)) if args.output else None
    axes, began = Axes.read(args.axes), time.monotonic()
    outcomes = try_all(axes, cover=args.pairwise, workers=workers, report=_tell)
    seconds = time.monotonic() - began
    print(f"{summary(outcomes)} {seconds / 60:.1f} minutes, {workers} processes.")
    for reason, cells in refusals(outcomes).items():
        print(f"refused, {cells} cells: {reason}")
    if place:
        write(place, page(outcomes, _command(args), _place(seconds, workers)))
    return 1 if any(one.outcome == "fails" for one in outcomes) else 0


def _checked(place: Path) -> Path:
    """UsageError where the page could not be written: known before anything is tried."""
    from pipeline.lab.folder import try_out

    try:
        if not place.parent.is_dir():
            raise UsageError(f"--output: there is no folder {place.parent}")
        if place.is_dir():
            where = place / "matrix.md"
            raise UsageError(f"--output: {place} is a folder. Name a file in it: {where}")
        try_out(place)
    except OSError as error:
        what = f"{place} cannot be written: {error.strerror}. Name a file where you may write"
        raise UsageError(f"--output: {what}") from error
    return place


def _tell(one: Any) -> None:
    """What does not simply work, at once; a dot for what does."""
    if one.outcome == "works":
        print(".", end="", flush=True, file=sys.stderr)
        return
    cell = one.cell
    what = (
        f"{cell.drafter} kv={cell.kv} {cell.family} tier={cell.tier} constraint={cell.constraint}"
    )
    print(f"\n{one.outcome}: {what} rows={one.rows}: {one.note}", flush=True, file=sys.stderr)


def _command(args: Namespace) -> str:
    words = ["headrace matrix", *(["--pairwise"] if args.pairwise else [])]
    words += ["--axes", *args.axes] if args.axes else []
    return " ".join([*words, *([f"-o {args.output}"] if args.output else [])])


def _place(seconds: float, workers: int) -> str:
    from pipeline.lab.table import machine

    facts = machine(1)
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return (
        f"on {facts['date'].partition(' ')[0]}, {facts['cores']} cores of {facts['cpu']}, {facts['system']}; "
        f"{packages}; {seconds / 60:.0f} minutes with {workers} processes."
    )
