"""`headrace cache ls|verify|gc|flush RECIPE [key=value …]`: the saved states on disk, without a model;
`headrace cache warm RECIPE FILE [key=value …]` computes prompts ahead."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from pipeline.cli.arguments import UsageError, add_recipe
from pipeline.server.local import admin_connection
from pipeline.types.places import user_path

ACTIONS = ("ls", "verify", "gc", "flush", "warm")
KEY = "HEADRACE_API_KEY"  # in the environment, for a server without a socket
SHOWN = 10  # prefixes of each namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=ACTIONS,
        help="ls: what is there; verify: read every checksum; gc: remove what no prompt can reach and what is "
        "over the cap; flush: ask the running server to write what waits; warm: compute the prompts of a FILE",
    )  # fmt: skip
    add_recipe(parser)


def run(args: Namespace) -> int:
    """0 if all is well; 1 if verify found something wrong, or not all is on disk after a flush or warm."""
    if args.action == "warm":
        return _warm(args)
    from pipeline.build import build
    from pipeline.compose import compose
    from pipeline.plan import plan

    built = build(plan(compose(args.recipe, args.overrides), allow=args.allow_code))
    if args.action == "flush":
        return _flush(built.settings["server"])
    tier = _durable_tier(built)
    tier.mount(collect=args.action == "gc")
    try:
        print(f"{tier.root}: {tier.store.total / 1e6:.1f} MB of {tier.cap / 1e6:.1f}")
        return _act(args.action, tier.store)
    finally:
        tier.close()


def _durable_tier(built: Any) -> Any:
    tier = next((tier for tier in built.parts["tier"] if "durable" in tier.can), None)
    if tier is None:
        raise UsageError("no tier of this recipe keeps states on disk. Try: 'tier=[ram,disk]'")
    return tier


def _act(action: str, store: Any) -> int:
    if action == "ls":
        for entry in store.survey(SHOWN):
            _show(entry)
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


def _show(entry: Mapping[str, Any]) -> None:
    """A namespace, and below it its prefixes, the most used first."""
    prefixes = entry["most_used"]
    print("  ".join(f"{name} {value}" for name, value in entry.items() if name != "most_used"))
    for prefix in prefixes:
        ids = " ".join(map(str, prefix["first"]))
        facts = f"{prefix['tokens']:,} tokens, {prefix['own']:,} its own, {prefix['bytes']:,} bytes"
        print(f"  {facts}, hits {prefix['hits']}: ids {ids} …")
    if len(prefixes) < entry["prefixes"]:
        print(f"  … and {entry['prefixes'] - len(prefixes)} more")


def _warm(args: Namespace) -> int:
    from rich.console import Console
    from rich.progress import track

    from pipeline import load
    from pipeline.warming import read_prompts, told, warm

    words = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    if len(words) != 1:
        raise UsageError("cache warm wants one FILE of prompts, one a line. Try: RECIPE FILE")
    overrides = [word for word in args.overrides if word not in words]
    try:
        prompts = read_prompts(user_path(words[0]).read_text("utf-8"), words[0])
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{words[0]} cannot be read: {error}") from error
    engine = load(args.recipe, *overrides, "flow=warm", allow=args.allow_code)
    _durable_tier(engine.pipeline)
    with engine:
        bar = track(prompts, "computing prompts", console=Console(stderr=True))
        report = warm(engine, prompts, bar)
    print("\n".join(told(report)))
    return 0 if report.well else 1


def _flush(server: Any) -> int:
    connection = admin_connection(server.host, server.port, server.socket)
    key = os.environ.get(KEY)
    try:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        connection.request("POST", "/admin/cache/flush", headers=headers)
        reply = connection.getresponse()
        report = json.load(reply)
    except OSError as error:
        where = server.socket or f"{server.host}:{server.port}"
        hint = "Try: server.socket=PATH, or server.port=…"
        raise UsageError(f"no server answers at {where}: {error}. {hint}") from error
    finally:
        connection.close()
    if reply.status in (401, 403):
        hint = (
            f"Try: server.socket=PATH, as the server was started with, or an admin's key in {KEY}"
        )
        raise UsageError(f"the server refuses: {report['error']['message']} {hint}")
    print(json.dumps(report, indent=1))
    return 0 if report.get("durable") else 1
