"""Requests under way at the same time, and their answers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pipeline.engine import Engine
from pipeline.results import collect, until_done
from pipeline.types import Delta, Done, Event

PATIENCE_S = 300.0  # longest wait for one event, on a machine that has other things to do too


class Running:
    """One submitted request whose events are collected; `seen` gets each first, on the owner's thread.
    `wanted` are fields of Request and Sampling."""

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
        return until_done(partial(self.events.get, timeout=PATIENCE_S))

    def result(self) -> dict[str, Any]:
        return collect(self)


def together(engine: Engine, prompts: Sequence[Any], **wanted: Any) -> list[dict[str, Any]]:
    """All prompts in flight at once; results in their order."""
    return [run.result() for run in [Running(engine, prompt, **wanted) for prompt in prompts]]
