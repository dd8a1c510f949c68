"""A server under mixed and rude clients.

    python -m pipeline.lab.soak smollm2 --minutes 10

All families of endpoints, whole and streamed; three of ten clients hang up at a random moment, one
of ten sends what no endpoint may take. Each answer is compared with that to the same request asked alone before.
A recipe with constraint=llguidance is asked for answers of a given form, too. Exit 1 if anything was not as
promised, 2 if the recipe cannot be served.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.errors import HeadraceError
from pipeline.lab.children import end_in_order
from pipeline.lab.contestants import Contestant
from pipeline.lab.folder import writable, write
from pipeline.lab.lines import to_stderr
from pipeline.lab.sides import Checked
from pipeline.lab.soak.run import Soaked, report, soak
from pipeline.lab.sse import BenchError
from pipeline.lab.table import table


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments().parse_intermixed_args(argv)
    try:
        soaked = _soaked(args)
    except (HeadraceError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if getattr(error, "code", None) == 1 else 2
    figures = soaked.figures()
    print(table(figures, {}, args.minutes * 60))
    for line in soaked.refused:
        print(f"not asked, since this recipe refuses it: {line}")
    for line in soaked.seen.faults:
        print(line)
    if args.json:
        write(args.json, json.dumps(report(soaked, figures), indent=1))
    return 0 if all(figure.met for figure in figures) else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.lab.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="what is served: a name (headrace list) or a file")
    parser.add_argument("overrides", nargs="*", help="key=value, as of headrace serve")
    parser.add_argument(
        "--minutes", type=_positive(float), default=10.0, help="of asking, beside rests (10)"
    )
    parser.add_argument(
        "--clients", type=_positive(int), default=12, help="that ask at one time (12)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do (0)")
    parser.add_argument("--json", type=writable, metavar="FILE", help="all samples, for a machine")
    return parser


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        if not 0 < (value := kind(text)) < float("inf"):
            raise ValueError(text)
        return value

    read.__name__ = "number above 0"  # argparse: "invalid number above 0 value: 'x'"
    return read


def _soaked(args: argparse.Namespace) -> Soaked:
    """ConfigError for a recipe that is wrong, before a server is started."""
    checked = Checked.of(args.recipe, args.overrides)
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        side = checked.side(args.recipe, Path(folder))
        one = Contestant(args.recipe, side.command, side.threads)
        one.start()
        try:
            one.wait()
            return soak(one, args.minutes * 60, args.clients, args.seed, to_stderr)
        finally:
            one.stop()


if __name__ == "__main__":
    end_in_order()
    raise SystemExit(main())
