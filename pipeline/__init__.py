"""Headrace's engine. From Python: `with pipeline.load("smollm2", "drafter=ngram") as engine: …`"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.engine import Engine

__all__ = ["load"]


def load(recipe: str, *overrides: str, allow: Iterable[str] = ()) -> Engine:
    """The engine of a recipe (bare name or path) with overrides, checked and built but not open:
    use it as a context manager. `allow` are code prefixes beside `stages` that may be run.

    ConfigError and GraphError list everything that is wrong; OpenError comes when it is opened.
    """
    from pipeline.build import pipeline_to_run
    from pipeline.engine import Engine

    return Engine(pipeline_to_run(recipe, overrides, allow))
