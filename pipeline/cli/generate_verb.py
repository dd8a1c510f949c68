"""`headrace generate RECIPE [key=value …] --prompt TEXT`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="one user turn; - reads it from standard input",
    )
    parser.add_argument("--max-tokens", type=_count, metavar="N", help="at most this many tokens")
    parser.add_argument(
        "--json", action="store_true", help="print one object with text, ids, timings, speculation"
    )


def _count(text: str) -> int:
    if int(text) < 0:
        raise ValueError
    return int(text)


_count.__name__ = "count of tokens"  # argparse: "invalid count of tokens value: 'x'"


def run(args: Namespace) -> int:
    from pipeline import load
    from pipeline.types import Delta

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with load(args.recipe, *args.overrides, allow=args.allow_code) as engine:
        if args.json:
            print(json.dumps(engine.generate(prompt, max_tokens=args.max_tokens)))
            return 0
        for event in engine.stream(prompt, max_tokens=args.max_tokens):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
        print()
    return 0
