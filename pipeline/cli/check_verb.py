"""`headrace check RECIPE [key=value …]`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)


def run(args: Namespace) -> int:
    from pipeline.build import build
    from pipeline.compose import compose
    from pipeline.plan import plan

    built = build(plan(compose(args.recipe, args.overrides), allow=args.allow_code))
    parts = sum(len(part) if isinstance(part, list) else 1 for part in built.parts.values())
    print(f"ok: {len(built.stages)} stages, {parts} parts")
    return 0
