"""`make bench`: every promised figure, each met or not met.

    python -m pipeline.lab.bench [--only NAME ...] [--pairs N] [--threads N] [--json FILE] [--list]

Ratios are medians of alternating pairs with a 90 % interval, and met if the interval reaches the
promise; half of the pairs are of servers started in the other order. Absolute figures are the best of
as many. A line whose promise is far off takes fewer. Exit 1 if any is not met.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.lab import (
    lines_drafting,
    lines_engine,
    lines_kv,
    lines_own,
    lines_page,
    lines_paged,
    lines_parts,
    lines_rivals,
    lines_rows,
    lines_saved,
    lines_serving,
)
from pipeline.lab.children import end_in_order, output
from pipeline.lab.contestants import Field, headrace, mlx_lm, threads_here
from pipeline.lab.figures import Figure
from pipeline.lab.folder import writable, write
from pipeline.lab.lines import Bench, Line, to_stderr
from pipeline.lab.sse import BenchError
from pipeline.lab.table import header, machine, row, table

LINES: tuple[Line, ...] = (
    *lines_engine.LINES,
    *lines_own.LINES,
    *lines_page.LINES,
    *lines_rows.LINES,
    *lines_kv.LINES,
    *lines_drafting.LINES,
    *lines_parts.LINES,
    *lines_paged.LINES,
    *lines_saved.LINES,
    *lines_rivals.LINES,
    *lines_serving.LINES,
)


def commands(folder: Path, threads: int) -> dict[str, list[str]]:
    """How each contestant is started."""
    return {
        "ours": headrace("smollm2", "drafter=none", threads=threads),
        "ours32": headrace("smollm2", "drafter=none", "limits.max_rows=32", threads=threads),
        "ngram": headrace("smollm2", "drafter=ngram", "depth.max=16", threads=threads),
        "suffix": headrace("smollm2", "drafter=suffix", "depth.max=16", threads=threads),
        "suffix8": headrace("smollm2", "drafter=suffix", "depth.max=8", threads=threads),
        "adaptive": headrace("smollm2", "drafter=suffix", "depth=adaptive", threads=threads),
        "kv8": headrace("smollm2", "drafter=none", "kv=kv8", threads=threads),
        "turboquant": headrace("smollm2", "drafter=none", "kv=turboquant", threads=threads),
        "wide": headrace("smollm2", "drafter=random", "depth.max=8", threads=threads),
        "resumable": headrace(
            "smollm2", "flow=resumable", *lines_saved.settings(folder.parent), threads=threads
        ),
        "disk": headrace("smollm2", *lines_saved.settings(folder.parent), threads=threads),
        "paged": headrace("smollm2", "drafter=none", "kv=paged", threads=threads),
        # A tier that is full before the 200th request, so that every further one evicts.
        "fake": headrace("fake", "model.layers=2", "tier.ram.max_gb=0.00005", threads=threads),
        "shipped": mlx_lm(folder, "shipped", threads),
        "same": mlx_lm(folder, "ours", threads),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=["*"], help="decode, ngram/*, …"
    )
    parser.add_argument("--pairs", type=int, default=20, help="fewer is for trying, not for saying")
    parser.add_argument(
        "--threads", type=int, default=threads_here(), help="of BLAS, for everybody"
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="all samples, for a machine")
    parser.add_argument("--list", action="store_true", help="print the names of the figures")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.lab.bench", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """0 if all wanted figures are met, 1 if not, 2 if a name is unknown."""
    names = [name for line in LINES for name in line.figures]
    wanted = [name for name in names if any(chosen(name, pattern) for pattern in args.only)]
    if args.list or not wanted:
        print("\n".join(names), file=sys.stdout if args.list else sys.stderr)
        return 0 if args.list else 2
    end_in_order()
    start = time.monotonic()
    facts = machine(args.threads)
    print(header(facts, args.pairs), flush=True)
    figures, failures, facts["blas"] = measure(args, wanted)
    print(table(figures, failures, time.monotonic() - start))
    print(f"BLAS of Headrace, and of mlx-lm where given the same: {facts['blas'] or 'not used'}")
    if args.json:
        write(args.json, json.dumps(report(facts, figures, failures), indent=1))
    return 0 if not failures and all(figure.met for figure in figures) else 1


def chosen(name: str, pattern: str) -> bool:
    """By its full name, by the part before the slash, or by a shell pattern."""
    return fnmatch(name, pattern) or name.partition("/")[0] == pattern


def measure(
    args: argparse.Namespace, wanted: Collection[str]
) -> tuple[list[Figure], dict[str, str], str]:
    """All lines, and the BLAS that was in use; a line that cannot be measured fails alone."""
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as place:
        folder = Path(place) / "smollm2-float32"
        named = commands(folder, args.threads)
        with Field(named, dict.fromkeys(named, args.threads)) as field:
            bench = Bench(field, args.threads, args.pairs, wanted)
            for line in LINES:
                if names := set(line.figures) & set(wanted):
                    _attempt(line, bench, folder, names, figures, failures)
            return figures, failures, ", ".join(sorted(field.blas))


def _attempt(
    line: Line,
    bench: Bench,
    folder: Path,
    names: Collection[str],
    figures: list[Figure],
    failures: dict[str, str],
) -> None:
    start = time.monotonic()
    try:
        if line.rivals and not folder.exists():
            prepare(folder)
        few = replace(bench, pairs=min(bench.pairs, line.most))
        fresh = [figure for figure in line.run(few) if figure.name in names]
    except (BenchError, OSError) as error:
        failures |= dict.fromkeys(sorted(names), str(error))
        to_stderr(f"{', '.join(sorted(names))}: {error}")
    else:
        figures += fresh
        for figure in fresh:
            to_stderr(row(figure))
        to_stderr(f"in {time.monotonic() - start:.0f} s")
    finally:
        bench.field.dismiss(*line.last)


def prepare(folder: Path) -> None:
    to_stderr("writing the float32 weights for mlx-lm")
    output(["-m", "stages.baseline", "prepare", str(folder)])


def report(
    facts: dict[str, Any], figures: Sequence[Figure], failures: dict[str, str]
) -> dict[str, Any]:
    entries = [{**asdict(figure), "met": figure.met} for figure in figures]
    return {"machine": facts, "figures": entries, "failures": failures}


if __name__ == "__main__":
    raise SystemExit(main())
