"""`headrace generate RECIPE [key=value …] --prompt TEXT`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import UsageError, add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--prompt",
        required=True,
        metavar="TEXT",
        help="one user turn; - reads it from standard input",
    )
    parser.add_argument(
        "--raw", action="store_true", help="the text as it is, without the chat template"
    )
    parser.add_argument("--max-tokens", type=_count, metavar="N", help="at most this many tokens")
    parser.add_argument(
        "--prompt-logprobs",
        type=_count,
        metavar="N",
        help="with --json: the log-probability of each prompt token, and the N best in its place",
    )
    parser.add_argument(
        "--adapter",
        metavar="ID",
        help="of adapters.folders: the one to answer with, several as a+b (their sum), or none",
    )
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

    if args.prompt_logprobs is not None and not args.json:
        raise UsageError("--prompt-logprobs: shown by --json only; add it")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    wanted = {"max_tokens": args.max_tokens, "raw": args.raw, "adapter": args.adapter}
    with load(args.recipe, *args.overrides, allow=args.allow_code) as engine:
        if args.json:
            top = args.prompt_logprobs
            print(json.dumps(engine.generate(prompt, prompt_logprobs=top, **wanted)))
            return 0
        for event in engine.stream(prompt, **wanted):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
        print()
    return 0
