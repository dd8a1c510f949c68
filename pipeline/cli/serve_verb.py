"""`headrace serve RECIPE|NAME.lock.yaml [key=value …] [--allow-drift NAME,…]`."""

from __future__ import annotations

import contextlib
import logging
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from pipeline.cli.arguments import UsageError, add_drift, add_recipe
from pipeline.cli.show_verb import describe_choices

if TYPE_CHECKING:
    from pipeline.build import Pipeline
    from pipeline.engine import Engine


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    add_drift(parser)


def run(args: Namespace) -> int:
    from pipeline.server.run import run_server
    from pipeline.server.spans.provider import Tracing

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    engine = _locked(args) if args.recipe.endswith(".lock.yaml") else _composed(args)
    settings = engine.pipeline.settings["server"]
    with contextlib.closing(engine):
        tracing = Tracing.of(engine.pipeline.settings["telemetry"])
        run_server(engine, settings, lambda line: print(line, flush=True), tracing)
    return 0


def _composed(args: Namespace) -> Engine:
    from pipeline.build import pipeline_to_run
    from pipeline.engine import Engine

    if args.allow_drift:
        raise UsageError(
            "--allow-drift: a recipe has nothing to differ from. Lock it: headrace lock"
        )
    built = pipeline_to_run(args.recipe, args.overrides, args.allow_code)
    _begin(built)
    engine = Engine(built)
    engine.open()
    return engine


def _begin(built: Pipeline) -> None:
    built.settings["server"].read_files()
    print(summary(built), flush=True)


def _locked(args: Namespace) -> Engine:
    """Opened, and found to be what was locked; DriftError lists all that is not."""
    from pipeline.engine import Engine
    from pipeline.lab.lock.drift import allowances
    from pipeline.lab.lock.file import read
    from pipeline.lab.lock.start import Locked

    allowed = allowances(args.allow_drift)
    locked = Locked(read(args.recipe), args.overrides, args.allow_code)
    locked.refuse(args.recipe, allowed)
    _begin(locked.pipeline)
    engine = Engine(locked.pipeline)
    engine.open()
    try:
        locked.look_at_the_model(engine)
        locked.refuse(args.recipe, allowed)
    except Exception:
        engine.close()
        raise
    for one in locked.drift:
        print(f"allowed: {one.told('here')}", flush=True)
    return engine


def summary(built: Pipeline) -> str:
    """What was chosen, and the stages of each phase in one line each."""
    lines = [f"  {phase:<8} {' → '.join(names)}" for phase, names in built.phases.items() if names]
    return "\n".join([describe_choices(built.choices), *lines])
