"""`headrace serve RECIPE|NAME.lock.yaml [key=value …] [--allow-drift NAME,…]`."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pipeline.cli.arguments import UsageError, add_drift, add_recipe

if TYPE_CHECKING:
    from pipeline.cli.served import Locked, Recipe
    from pipeline.engine import Engine
    from pipeline.isolate.engine import IsolatedEngine


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    add_drift(parser)


def run(args: Namespace) -> int:
    from pipeline.cli.served import speak
    from pipeline.server.run import run_server
    from pipeline.server.spans.provider import Tracing

    speak()
    with contextlib.closing(_opened(_served(args))) as engine:
        tracing = Tracing.of(engine.settings["telemetry"])
        say: Callable[[str], None] = partial(print, flush=True)
        run_server(engine, engine.settings["server"], say, tracing)
    return 0


def _served(args: Namespace) -> Recipe | Locked:
    from pipeline.cli.served import Locked, Recipe
    from pipeline.lab.lock.drift import allowances

    if args.recipe.endswith(".lock.yaml"):
        drift = allowances(args.allow_drift)
        return Locked.of(args.recipe, args.overrides, args.allow_code, drift)
    if args.allow_drift:
        raise UsageError(
            "--allow-drift: a recipe has nothing to differ from. Lock it: headrace lock"
        )
    return Recipe.of(args.recipe, args.overrides, args.allow_code)


def _opened(served: Recipe | Locked) -> Engine | IsolatedEngine:
    """In this process, or in one of its own; then this one never imports MLX."""
    from pipeline.cli.served import Apart, isolated

    if not isolated(served):
        return served.open()
    from pipeline.isolate.engine import IsolatedEngine

    engine = IsolatedEngine(Apart(served))
    engine.open()
    return engine
