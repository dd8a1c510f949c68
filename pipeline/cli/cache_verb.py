"""`headrace cache ls|verify|gc|flush RECIPE [key=value …]`: the saved states on disk, without a model."""

from __future__ import annotations

import http.client
import json
from argparse import ArgumentParser, Namespace
from typing import Any

from pipeline.cli.arguments import UsageError, add_recipe

ACTIONS = ("ls", "verify", "gc", "flush")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=ACTIONS,
        help="ls: what is there; verify: read every checksum; gc: remove what no prompt can reach and what is "
        "over the cap; flush: ask the running server to write what waits",
    )  # fmt: skip
    add_recipe(parser)


def run(args: Namespace) -> int:
    """0 if all is well; 1 if verify found something wrong or a flush was not durable."""
    from pipeline.build import build
    from pipeline.compose import compose
    from pipeline.plan import plan

    built = build(plan(compose(args.recipe, args.overrides), allow=args.allow_code))
    if args.action == "flush":
        return _flush(built.settings["server"])
    tier = next((tier for tier in built.parts["tier"] if "durable" in tier.can), None)
    if tier is None:
        raise UsageError("no tier of this recipe keeps states on disk. Try: 'tier=[ram,disk]'")
    tier.mount(collect=args.action == "gc")
    try:
        print(f"{tier.root}: {tier.store.total / 1e6:.1f} MB of {tier.cap / 1e6:.1f}")
        return _act(args.action, tier.store)
    finally:
        tier.close()


def _act(action: str, store: Any) -> int:
    if action == "ls":
        for entry in store.survey():
            print("  ".join(f"{name} {value}" for name, value in entry.items()))
        return 0
    if action == "gc":
        removed = store.removed + store.evictions  # opening has collected
        print(f"{removed} files removed, {len(store.shelf.files)} kept")
        return 0
    bad = store.verify()
    for name, reason in bad.items():
        print(f"{name}: {reason}")
    print(f"{len(store.shelf.files)} files are right, {len(bad)} were not and are removed")
    return 1 if bad else 0


def _flush(server: Any) -> int:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=600)
    try:
        connection.request("POST", "/admin/cache/flush")
        report = json.load(connection.getresponse())
    except OSError as error:
        where = f"{server.host}:{server.port}"
        raise UsageError(f"no server answers at {where}: {error}. Try: server.port=…") from error
    finally:
        connection.close()
    print(json.dumps(report, indent=1))
    return 0 if report.get("durable") else 1
