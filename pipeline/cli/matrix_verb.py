"""`headrace matrix [--axes AXIS=A,B …] [--pairwise] [-o FILE]`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from pipeline.cli.arguments import count


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
    parser.add_argument(
        "-o", "--output", type=_file, metavar="FILE", help="write the page there, as Markdown"
    )


def run(args: Namespace) -> int:
    """0 if no cell fails, else 1. Refused cells are told, with their reasons."""
    from pipeline.lab.children import end_in_order
    from pipeline.lab.folder import write
    from pipeline.lab.matrix.cells import Axes
    from pipeline.lab.matrix.page import page, refusals, summary
    from pipeline.lab.matrix.run import run as try_all
    from pipeline.lab.table import counted

    end_in_order()
    workers = args.workers or os.cpu_count() or 1
    axes, began = Axes.read(args.axes), time.monotonic()
    outcomes = try_all(axes, cover=args.pairwise, workers=workers, report=_tell)
    seconds = time.monotonic() - began
    print(
        f"{summary(outcomes)} {seconds / 60:.1f} minutes, {counted(workers, 'process', 'processes')}."
    )
    for reason, cells in refusals(outcomes).items():
        print(f"refused, {counted(cells, 'cell')}: {reason}")
    if args.output:
        write(args.output, page(outcomes, _command(args), _place(seconds, workers)))
    return 1 if any(one.outcome == "fails" for one in outcomes) else 0


def _file(text: str) -> Path:
    from pipeline.lab.folder import writable

    return writable(text)


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
    words = ["headrace", "matrix", *(["--pairwise"] if args.pairwise else [])]
    words += ["--axes", *args.axes] if args.axes else []
    return shlex.join([*words, *(["-o", str(args.output)] if args.output else [])])


def _place(seconds: float, workers: int) -> str:
    from pipeline.lab.table import counted, machine

    facts = machine(1)
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return (
        f"on {facts['date'].partition(' ')[0]}, {facts['cores']} cores of {facts['cpu']}, {facts['system']}; "
        f"{packages}; {seconds / 60:.0f} minutes with {counted(workers, 'process', 'processes')}."
    )
