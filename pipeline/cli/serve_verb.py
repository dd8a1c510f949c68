"""`headrace serve RECIPE|NAME.lock.yaml [key=value …] [--allow-drift NAME,…]`."""

from __future__ import annotations

import contextlib
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.cli.arguments import UsageError, add_drift, add_recipe

if TYPE_CHECKING:
    from pipeline.cli.served import Locked, Recipe
    from pipeline.server.contract import ServedEngine


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser, metavar="RECIPE|NAME.lock.yaml")
    add_drift(parser)


def run(args: Namespace) -> int:
    from pipeline.server import journal
    from pipeline.server.run import run_server
    from pipeline.server.spans.provider import Tracing

    journal.begin()
    engine, settings = _opened(_served(args))
    with contextlib.closing(engine):
        journal.begin(settings["server"].log)
        tracing = Tracing.of(settings["telemetry"])
        return run_server(engine, settings["server"], lambda line: print(line, flush=True), tracing)


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


def _opened(served: Recipe | Locked) -> tuple[ServedEngine, Mapping[str, Any]]:
    """The engine, in this process or in one of its own, and the settings of groups. Where it has its own,
    this one never imports MLX."""
    from pipeline.cli.served import Apart, isolated

    if not isolated(served):
        engine = served.open()
        return engine, engine.pipeline.settings
    from pipeline.isolate.engine import IsolatedEngine

    apart = Apart(served)
    isolate = IsolatedEngine(apart, apart.again)
    isolate.open()
    return isolate, isolate.settings
