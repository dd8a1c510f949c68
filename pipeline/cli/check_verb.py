"""`headrace check RECIPE [key=value …]`."""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from pipeline.cli.arguments import add_recipe


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)


def run(args: Namespace) -> int:
    with _put_off("numpy", "mlx.core", "mlx.nn"):
        from pipeline.build import build
        from pipeline.compose import compose
        from pipeline.plan import plan

        built = build(plan(compose(args.recipe, args.overrides), allow=args.allow_code))
    parts = sum(len(part) if isinstance(part, list) else 1 for part in built.parts.values())
    print(f"ok: {len(built.stages)} stages, {parts} parts")
    return 0


class _Later(ModuleType):
    """Stands for a package until something in it is used. (`importlib.util.LazyLoader` means the same,
    but up to Python 3.12 a plain `import` of it already counts as use.)"""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        package = import_module(self.__name__)
        self.__dict__.update(vars(package))
        return getattr(package, name)


@contextmanager
def _put_off(*names: str) -> Iterator[None]:
    """Nothing computes here, and importing what could would be a quarter of the time; nor is there
    garbage worth looking for."""
    later = {name: _Later(name) for name in names if name not in sys.modules}
    collected = gc.isenabled()
    sys.modules.update(later)
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
        for name, package in later.items():
            if sys.modules.get(name) is package:
                del sys.modules[name]
