"""`headrace quality RECIPE [key=value …] [--kv NAME,…] [--text FILE] [--json]`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import UsageError, add_recipe, count
from pipeline.types.places import user_path


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--kv",
        metavar="NAME,…",
        help="these policies; without it the one chosen, and where that is native, every one",
    )
    parser.add_argument("--text", metavar="FILE", help="score this text instead of our own")
    parser.add_argument(
        "--tokens", type=count, default=2048, metavar="N", help="at most so many tokens of context"
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")


def run(args: Namespace) -> int:
    from pipeline.lab import quality

    named = _named(args.kv)
    asked = quality.asked(args.recipe, args.overrides, named, args.allow_code)
    lengths = [n for n in quality.LENGTHS if n < args.tokens] + [args.tokens]
    name = f"--text: {args.text}" if args.text else "our own text"
    report = quality.measure(asked, _text(args.text), lengths, quality.to_stderr, name)
    print(json.dumps(quality.as_json(report)) if args.json else quality.as_text(report))
    return 0


def _named(said: str | None) -> list[str]:
    names = [name.strip() for name in (said or "").split(",") if name.strip()]
    if said is not None and not names:
        raise UsageError(f"--kv: names no policy, got '{said}'. Try: headrace list kv")
    return names


def _text(file: str | None) -> str:
    from pipeline.lab.texts import read

    if file is None:
        return "\n\n".join(map(read, ("survey", "mill")))
    try:
        text = user_path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text: {file} cannot be read: {error}") from None
    if not text.strip():
        raise UsageError(f"--text: {file} is empty: there is nothing to score")
    return text
