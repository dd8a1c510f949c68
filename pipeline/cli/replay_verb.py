"""`headrace replay NAME.lock.yaml [key=value …] [--allow-drift NAME,…]`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from pipeline.cli.arguments import add_drift, add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
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
    apart = 0
    with Engine(locked.pipeline) as engine:
        locked.look_at_the_model(engine)
        bad = locked.refused
        for one in locked.drift:
            print(
                f"{'differs' if one in bad else 'allowed'}: {one if one in bad else one.told('here')}"
            )
        for name, tokens, parting in replayed(engine, lock.probes):
            apart += parting is not None
            print(parting or f"probe {name}: {tokens} tokens, all equal", flush=True)
    same = "every token is the locked one" if not apart else f"probes that differ: {apart}"
    print(f"{same}; other differences: {len(bad)}" if bad else same)
    return 2 if apart or bad else 0
