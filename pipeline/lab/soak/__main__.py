"""A server under mixed and rude clients.

    python -m pipeline.lab.soak RECIPE [OVERRIDE ...] --minutes 10

All families of endpoints, whole and streamed; three of ten clients hang up at a random moment, one
of ten sends what no endpoint may take. Each answer is compared with that to the same request asked alone before.
Exit 1 if anything was not as promised.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.lab.children import end_in_order
from pipeline.lab.contestants import Contestant, headrace, threads_here
from pipeline.lab.lines import to_stderr
from pipeline.lab.soak.run import report, soak
from pipeline.lab.table import table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.lab.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="as of headrace serve")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all samples, for a machine")
    args = parser.parse_intermixed_args(argv)
    end_in_order()
    threads = threads_here()
    one = Contestant(args.recipe, headrace(args.recipe, *args.overrides, threads=threads), threads)
    one.start()
    try:
        one.wait()
        soaked = soak(one, args.minutes * 60, args.clients, args.seed, to_stderr)
    finally:
        one.stop()
    figures = soaked.figures()
    print(table(figures, {}, args.minutes * 60))
    for line in (*soaked.refused, *soaked.seen.faults):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(report(soaked, figures), indent=1), "utf-8")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
