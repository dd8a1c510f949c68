"""`headrace capabilities [--kv NAME,…]`: run every KV policy on every kind of layer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--kv", metavar="NAME,…", help="these policies only")


def run(args: Namespace) -> int:
    from pipeline.lab.capabilities import measure, page

    names = [name.strip() for name in (args.kv or "").split(",") if name.strip()]
    print(page(list(measure(names))), end="")
    return 0
