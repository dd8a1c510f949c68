"""`headrace lock RECIPE [key=value …] -o NAME.lock.yaml`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import add_recipe
from pipeline.types.places import user_path


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "-o", "--output", required=True, metavar="NAME.lock.yaml", help="must not be there yet"
    )


def run(args: Namespace) -> int:
    from pipeline.lab.lock.file import refuse_place, write
    from pipeline.lab.lock.start import make
    from pipeline.secrets import command

    place = user_path(args.output)
    refuse_place(place)
    lock = make(args.recipe, args.overrides, args.allow_code, _say)
    write(lock, place)
    tokens = sum(len(probe["token_ids"]) for probe in lock.probes)
    files = sum(len(group) for group in lock.artifacts.values())
    print(
        f"{place}: {files} files, {len(lock.packages)} packages, {len(lock.probes)} probes of {tokens} tokens"
    )
    then = [command(verb, str(place), (), args.allow_code) for verb in ("replay", "serve")]
    print(f"next: {'; '.join(then)}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
