"""`headrace key NAME [--admin]`: a new API key, told once, and the line that lets a server know it. Standard output
has the key alone, for `KEY=$(headrace key NAME)`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="whose it is: small letters, digits, _ and -")
    parser.add_argument("--admin", action="store_true", help="it may also use /admin")


def run(args: Namespace) -> int:
    from pipeline.server.keys import NAME, make_key

    if not NAME.fullmatch(args.name):
        raise UsageError(f"{args.name!r}: wants small letters, digits, _ and -, 64 at most")
    secret, digest = make_key()
    line = f'{args.name}: {{sha256: "{digest}"{", admin: true" if args.admin else ""}}}'
    told = f"""\
Its line in the file that server.keys=FILE names (limits are added there: rate, concurrent, …):
{line}
The key, for its owner. It is told only here:"""
    print(told, file=sys.stderr, flush=True)
    print(secret)
    return 0
