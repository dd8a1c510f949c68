"""Engines for tests, and requests run in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pipeline
from pipeline.engine import Engine
from pipeline.lab.together import PATIENCE_S, Running, together
from pipeline.types import Delta, Event

__all__ = ["CONFIGS", "ORACLE", "Halted", "Running", "prompt_ids", "serving", "together"]

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


class Halted(Running):
    """An answer that has begun and stands still, and with it whoever waits for the owner's thread, until
    `go`. What it has told so far, by then or later, is `told`."""

    def __init__(self, engine: Engine, prompt: Any, *, max_tokens: int = 4):
        self.engine, self.told = engine, list[Event]()
        self._begun, self._goes = threading.Event(), threading.Event()
        super().__init__(engine, prompt, max_tokens=max_tokens, ignore_eos=True, seen=self._seen)
        assert self._begun.wait(PATIENCE_S)

    def go(self) -> None:
        self._goes.set()

    def _seen(self, event: Event) -> None:
        self.told.append(event)
        if isinstance(event, Delta):
            self._begun.set()
            self._goes.wait(PATIENCE_S)


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """A reproducible prompt of printable bytes."""
    return [33 + (i * i * 7 + seed * 31 + i * 13) % 90 for i in range(length)]
