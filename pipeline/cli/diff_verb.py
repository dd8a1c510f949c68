"""`headrace diff RECIPE [OTHER] [key=value …]`: from base to it, or from it to another recipe; of two
locks, everything that was locked (of answers the tokens)."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from pipeline.cli.arguments import UsageError, add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser, metavar="RECIPE|A.lock.yaml", more="OTHER|B.lock.yaml")


def run(args: Namespace) -> int:
    """0; of locks, 2 if they differ."""
    if any(name.endswith(".lock.yaml") for name in (args.recipe, *args.overrides[:1])):
        return _locks(args)
    from pipeline.compose import compose, leaves
    from pipeline.plan import plan

    names = [None, args.recipe]
    if args.overrides and "=" not in args.overrides[0] and not args.overrides[0].startswith("~"):
        names = [args.recipe, args.overrides.pop(0)]
    said = ([] if names[0] is None else args.overrides, args.overrides)
    old, new = (
        plan(compose(name, overrides), allow=args.allow_code)
        for name, overrides in zip(names, said, strict=True)
    )
    lines = _lines("options", old.composed.choices, new.composed.choices)
    values = _lines("values", dict(leaves(old.config)), dict(leaves(new.config)))
    print(f"{old.composed.recipe} -> {new.composed.recipe}")
    print("\n".join([*lines, *values]) or "no difference")
    return 0


def _locks(args: Namespace) -> int:
    from dataclasses import asdict

    from pipeline.lab.lock.drift import differences, probes_apart
    from pipeline.lab.lock.file import read

    if len(args.overrides) != 1 or "=" in args.overrides[0]:
        raise UsageError(
            "a lock is compared with another one: headrace diff A.lock.yaml B.lock.yaml"
        )
    (other,) = args.overrides
    ours, theirs = read(args.recipe), read(other)
    found = differences(asdict(ours), asdict(theirs)) + probes_apart(ours.probes, theirs.probes)
    print(f"{args.recipe} -> {other}")
    print("\n".join(f"  {one.told('in the other')}" for one in found) or "no difference")
    return 2 if found else 0


def _lines(title: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = [f"  {key}: {before} -> {after}" for key, before, after in changes(old, new)]
    return [title, *found] if found else []


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, before, after) wherever they differ; a dash where there is nothing."""
    keys = dict.fromkeys([*old, *new])
    return [
        (key, str(old.get(key, "-")), str(new.get(key, "-")))
        for key in keys
        if key not in old or key not in new or old[key] != new[key]
    ]
