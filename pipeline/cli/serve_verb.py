"""`headrace serve RECIPE [key=value …]`."""

from __future__ import annotations

import logging
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from pipeline.cli.arguments import UsageError, add_recipe
from pipeline.cli.show_verb import describe_choices

if TYPE_CHECKING:
    from pipeline.build import Pipeline


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)


def run(args: Namespace) -> int:
    from pipeline.build import pipeline_to_run
    from pipeline.engine import Engine
    from pipeline.server.run import run_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    built = pipeline_to_run(args.recipe, args.overrides, args.allow_code)
    settings = built.settings["server"]
    print(summary(built), flush=True)
    engine = Engine(built)
    engine.open()
    try:
        run_server(engine, settings, lambda line: print(line, flush=True))
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise UsageError(f"cannot listen on {where}: {error}. Try: server.port=0") from error
    return 0


def summary(built: Pipeline) -> str:
    """What was chosen, and the stages of each phase in one line each."""
    lines = [f"  {phase:<8} {' → '.join(names)}" for phase, names in built.phases.items() if names]
    return "\n".join([describe_choices(built.choices), *lines])
