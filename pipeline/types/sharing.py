"""The protocols of those who share the machine out among requests: who starts, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from pipeline.types.parts import KVPolicy, Part, Target
from pipeline.types.sequence import Sequence


class Scheduler(Part, Protocol):
    """Orders waiting requests and shares out a step. Knows nothing of models. If `can` says
    "priority", `Request.priority` changes the order."""

    step_tokens: int | None  # tokens of one step while rows decode, theirs included; None: no bound

    def order(self, waiting: Seq[Sequence], active: Seq[Sequence]) -> list[Sequence]:
        """Who may start first; `waiting` is in order of arrival. The engine takes from the front
        while there is room; who does not fit there holds up those behind."""

    def started(self, sequence: Sequence) -> None:
        """It has left the queue for a row."""

    def finished(self, sequence: Sequence) -> None:
        """Its last event is due, whether it ever started or not."""


class Limits(Part, Protocol):
    """What the operator allows."""

    max_rows: int
    max_queue: int
    max_tokens: int | None  # cap on every answer
    context: int | None  # cap on prompt + answer, below the model's own

    def admit(
        self, prompt_len: int, max_new: int, target: Target, kv: KVPolicy, param: str
    ) -> None:
        """RequestError with the arithmetic if the request can never fit; `param` is its field."""

    def fits(self, sequence: Sequence, running: Seq[Sequence], kept: Seq[int] = ()) -> bool:
        """Whether it may start beside those that have rows and parked states of `kept` tokens; if not
        it waits. May make saved states of tiers go. True for every admitted sequence while nothing
        runs and nothing is kept. If `can` says "park", rows of lower priority make way for who does not fit."""

    def stats(self, running: Seq[Sequence], kept: Seq[int] = ()) -> Mapping[str, Any]:
        """Plain numbers, any thread: `estimate` (what is billed, bytes) and `enforced` (what holds
        whatever was estimated), apart."""
