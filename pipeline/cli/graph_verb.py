"""`headrace graph RECIPE [key=value …] [--format text|mermaid|json]`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--format", choices=("text", "mermaid", "json"), default="text")


def run(args: Namespace) -> int:
    from pipeline.build import build
    from pipeline.compose import compose
    from pipeline.drawing import DRAWINGS
    from pipeline.plan import plan

    built = build(plan(compose(args.recipe, args.overrides), allow=args.allow_code))
    print(DRAWINGS[args.format](built.graph))
    return 0
