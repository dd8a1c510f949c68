"""`headrace doctor [device=… device.setting=…]`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from pipeline.cli.arguments import UsageError, add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser, optional=True)


def run(args: Namespace) -> int:
    from pipeline.build import open_device
    from pipeline.compose import compose
    from pipeline.plan import plan

    if args.overrides and "=" not in (word := args.overrides[0]):
        raise UsageError(
            f"doctor looks at the machine, not at a recipe: '{word}'. Try: headrace doctor, "
            f"or headrace check {word}"
        )
    device = plan(compose(None, args.overrides), allow=args.allow_code, first=open_device).made[
        "device"
    ]
    facts, speed = device.describe(), device.measure()
    advice = speed.pop("advice", "")
    print("\n".join([*lines("device", facts), *lines("float32 products", speed)]))
    if speed.get("slow"):
        print(f"error: {advice}", file=sys.stderr)
        return 2
    print("ok")
    return 0


def lines(title: str, facts: Mapping[str, Any]) -> list[str]:
    """A title and one `name value` line for each fact that says something."""
    said = [(name, value) for name, value in facts.items() if value not in ("", [], None)]
    return [title, *[f"  {name:<18}{_shown(name, value)}" for name, value in said]]


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1e9:.1f} GB"
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
