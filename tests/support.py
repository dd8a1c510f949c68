"""Engines for tests, and requests run in them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pipeline
from pipeline.engine import Engine
from pipeline.results import collect
from pipeline.types import Delta, Done, Event, Failed

ORACLE = "drafter._target_=toy_drafters.Oracle"


@contextmanager
def serving(*overrides: str, recipe: str = "tiny") -> Iterator[Engine]:
    """An engine of a small recipe; parts from tests/ are allowed."""
    with pipeline.load(
        recipe, "debug=none", "telemetry=quiet", *overrides, allow=("toy_drafters.",)
    ) as engine:
        yield engine


class Running:
    """One submitted request whose events are collected; `seen` gets each first, on the owner's thread."""

    def __init__(
        self,
        engine: Engine,
        prompt: Any,
        *,
        seen: Callable[[Event], None] | None = None,
        **wanted: Any,
    ):
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def deliver(event: Event) -> None:
            if seen is not None:
                seen(event)
            self.events.put(event)

        self.ticket = engine.submit(engine.request(prompt, **wanted), deliver)

    def __iter__(self) -> Iterator[Delta | Done]:
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta | Done):
                yield event
            if isinstance(event, Done):
                return

    def result(self) -> dict[str, Any]:
        return collect(self)


def together(engine: Engine, prompts: list[Any], **wanted: Any) -> list[dict[str, Any]]:
    """All prompts in flight at once; results in their order."""
    return [run.result() for run in [Running(engine, prompt, **wanted) for prompt in prompts]]


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """A reproducible prompt of printable bytes."""
    return [33 + (i * i * 7 + seed * 31 + i * 13) % 90 for i in range(length)]
