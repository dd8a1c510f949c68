"""Engines for tests, and requests run in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pipeline
from pipeline.engine import Engine
from pipeline.lab.together import Running, together

__all__ = ["CONFIGS", "ORACLE", "Running", "prompt_ids", "serving", "together"]

ORACLE = "drafter._target_=toy_drafters.Oracle"
CONFIGS = {  # without drafts, with some, and with many wrong ones
    "plain": ("flow=plain", "drafter=none"),
    "ngram": ("flow=speculative", "drafter=ngram", "drafter.min_ngram=1", "depth.max=4"),
    "often wrong": ("flow=speculative", ORACLE, "+drafter.wrong_every=3", "depth.max=4"),
}


@contextmanager
def serving(*overrides: str, recipe: str = "tiny") -> Iterator[Engine]:
    """An engine of a small recipe; parts from tests/ are allowed."""
    with pipeline.load(
        recipe, "debug=none", "telemetry=quiet", *overrides, allow=("toy_drafters.",)
    ) as engine:
        yield engine


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """A reproducible prompt of printable bytes."""
    return [33 + (i * i * 7 + seed * 31 + i * 13) % 90 for i in range(length)]
