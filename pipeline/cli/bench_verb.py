"""`headrace bench [--only NAME …]`: what `make bench` runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    from pipeline.lab.bench import add_arguments

    add_arguments(parser)


def run(args: Namespace) -> int:
    from pipeline.lab.bench import run

    return run(args)
