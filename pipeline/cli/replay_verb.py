"""`headrace replay NAME.lock.yaml [key=value …] [--allow-drift NAME,…]`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.cli.arguments import add_drift, add_recipe

if TYPE_CHECKING:
    from pipeline.lab.lock.drift import Difference


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser, metavar="NAME.lock.yaml")
    add_drift(parser)


def run(args: Namespace) -> int:
    """0 if nothing differs but what may, and every token is the locked one; else 2. What differs is
    printed first, and the probes are asked all the same if the model opens: they tell what it means."""
    from pipeline.engine import Engine
    from pipeline.lab.lock.drift import allowances
    from pipeline.lab.lock.file import read
    from pipeline.lab.lock.probes import replayed
    from pipeline.lab.lock.start import Locked

    lock = read(args.recipe)
    locked = Locked(lock, args.overrides, args.allow_code, allowances(args.allow_drift))
    locked.check_names()
    _tell(locked.drift, locked.allowed)
    apart = 0
    with Engine(locked.pipeline) as engine:
        _tell(locked.look_at_the_model(engine), locked.allowed)
        for name, tokens, parting in replayed(engine, lock.probes):
            apart += parting is not None
            print(parting or f"probe {name}: {tokens} tokens, all equal", flush=True)
    bad = len(locked.refused)
    same = "every token is the locked one" if not apart else f"probes that differ: {apart}"
    print(f"{same}; other differences: {bad}" if bad else same)
    return 2 if apart or bad else 0


def _tell(found: Sequence[Difference], allowed: Sequence[str]) -> None:
    from pipeline.lab.lock.drift import refused

    bad = refused(found, allowed)
    for one in found:
        print(f"differs: {one}" if one in bad else f"allowed: {one.told('here')}", flush=True)
