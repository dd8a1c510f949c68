"""`headrace sweep EXPERIMENT [key=values …] [--runner local|ray] [--out FOLDER]`."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.arguments import UsageError, add_recipe, count
from pipeline.types.places import user_path

if TYPE_CHECKING:
    from pipeline.lab.runners import Runner
    from pipeline.lab.sweep import Row

AGAIN = "The same command goes on from there."  # said where it is interrupted


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--metrics", metavar="NAME,…", help="columns of the table and axes of the plots"
    )
    parser.add_argument("--repeats", type=count, metavar="N", help="measured passes a point")
    parser.add_argument(
        "--quality-tokens", type=count, metavar="N", help="length of the text that is scored"
    )
    parser.add_argument(
        "--out",
        type=user_path,
        metavar="FOLDER",
        help="where results are kept and found again (runs/…)",
    )
    parser.add_argument(
        "--runner", choices=("local", "ray"), default="local",
        help="local: one point at a time here; ray: tasks on a Ray cluster (pip install 'headrace[ray]')",
    )  # fmt: skip
    parser.add_argument(
        "--address", help="of a running Ray cluster; without it, one is started here"
    )
    parser.add_argument(
        "--cpus", type=count, default=1, metavar="N", help="of a Ray machine that a point has (1)"
    )


def run(args: Namespace) -> int:
    """0 if every point was measured; 1 if some failed: they are rows with their reason."""
    from pipeline.cli.progress import out
    from pipeline.lab import experiment, sweep
    from pipeline.lab.children import end_in_order
    from pipeline.lab.report import needs, publish
    from pipeline.lab.table import counted
    from pipeline.lab.tables import as_table

    end_in_order()
    needs()
    said = args.metrics
    metrics = None if said is None else [name.strip() for name in said.split(",")]
    asked = {"metrics": metrics, "repeats": args.repeats, "quality_tokens": args.quality_tokens}
    wanted = experiment.read(args.recipe, args.overrides, asked, args.allow_code)
    folder = args.out or Path("runs") / wanted.name
    about = {"command": _command(args), "date": time.strftime("%Y-%m-%d %H:%M")}
    with _told() as tell:
        rows = sweep.run(
            wanted, folder, _runner(args), tell,
            lambda place, rows: publish(place, wanted, rows, about),
        )  # fmt: skip
    out().print(as_table(wanted, rows))
    failed = sum(row.status != "ok" for row in rows)
    known = sum(row.known for row in rows)
    print(f"{counted(len(rows), 'point')}, {failed} failed, {known} known from before")
    print(f"{folder / 'report.html'}, results.csv and results.json beside it")
    return 1 if failed else 0


def _runner(args: Namespace) -> Runner:
    from pipeline.lab.runners import LocalRunner, RayRunner

    if args.runner == "ray":
        return RayRunner(args.address, args.cpus)
    if args.address:
        raise UsageError("--address is of a Ray cluster. Add --runner ray")
    return LocalRunner()


@contextmanager
def _told() -> Iterator[Callable[[Row, int], None]]:
    """A bar on the terminal, and a line for each point that is done."""
    from pipeline.cli.progress import bar

    with bar() as say:
        done = 0

        def tell(row: Row, of: int) -> None:
            nonlocal done
            done += 1
            what = "known from before" if row.known else row.status
            more = f": {row.reason}" if row.reason else ""
            print(f"{row.number} of {of}  {row.label}: {what}{more}", file=sys.stderr)
            say(row.label, done, of)

        say("the first point", 0, 1)
        yield tell


def _command(args: Namespace) -> str:
    from pipeline.secrets import command, typed

    said = {"metrics": args.metrics, "repeats": args.repeats, "quality-tokens": args.quality_tokens}
    more = [word for name, value in said.items() if value for word in (f"--{name}", value)]
    return command("sweep", args.recipe, typed(args.overrides), args.allow_code, more)
