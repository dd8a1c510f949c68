"""The queue: admitted requests without a row, and who of them starts next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.parking import parked, who_gives_way
from pipeline.siblings import led
from pipeline.types import Sequence


class Waiting:
    """Asks the scheduler for the order and the limits for room. Owner thread only, but for `len`.

    Only the front may start: one that does not fit yet holds up all behind it, so that it cannot be
    overtaken for ever by smaller ones. Who waits for a sibling's prompt holds up nobody.
    """

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = parts
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def kept(self) -> list[int]:
        """Tokens of each parked state."""
        return [len(s.match.state.tokens) for s in parked(self._sequences) if s.match]

    def append(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def clear(self) -> None:
        self._sequences = []

    def take_ended(self) -> list[Sequence]:
        """Those that gave up; they are no longer in the queue."""
        ended = [s for s in self._sequences if not s.live]
        if ended:
            self._sequences = [s for s in self._sequences if s.live]
        return ended

    def take(self, running: Seq[Sequence]) -> list[list[Sequence]]:
        """Those that may start beside `running`, in groups whose prompts prefill together."""
        if not self._sequences or len(running) >= self._parts["limits"].max_rows:
            return []
        groups: dict[tuple[int, int | None], list[Sequence]] = {}
        running = list(running)
        for sequence in self._order(running):
            if led(sequence, running):
                continue
            if not self._fits(sequence, running):
                break
            running.append(self.take_one(sequence))
            shape = (len(sequence.prompt_ids), sequence.request.prefill_chunk)
            groups.setdefault(shape, []).append(sequence)
        return list(groups.values()) if running else [[self._resumed()]]

    def _resumed(self) -> Sequence:
        """Nothing runs, and the front does not fit beside the states of parked rows: the first of
        these goes on, whatever the others hold, or nobody ever would."""
        first = parked(self._order([]))[0]
        self._parts["limits"].fits(first, [])  # room of the tiers is its own
        return self.take_one(first)

    def take_one(self, sequence: Sequence) -> Sequence:
        """This one starts."""
        self._sequences.remove(sequence)
        self._parts["scheduler"].started(sequence)
        sequence.timings.setdefault("queue", time.perf_counter() - sequence.submitted)
        return sequence

    def blocked(
        self, running: Seq[Sequence], active: Seq[Sequence]
    ) -> tuple[Sequence, list[Sequence]] | None:
        """The front of the queue and the rows of `active` to park for it, if that is to be done."""
        if not self._sequences or not active or "park" not in self._parts["limits"].can:
            return None
        first = next((s for s in self._order(running) if not led(s, running)), None)
        if first is None:
            return None

        def suffices(leaving: list[Sequence]) -> bool:
            staying = [s for s in running if s not in leaving]
            return self._fits(first, staying, leaving)

        leaving = who_gives_way(first, active, suffices)
        return (first, leaving) if leaving else None

    def _order(self, running: Seq[Sequence]) -> list[Sequence]:
        found: list[Sequence] = self._parts["scheduler"].order(self._sequences, running)
        return found

    def _fits(
        self, sequence: Sequence, running: Seq[Sequence], leaving: Seq[Sequence] = ()
    ) -> bool:
        limits = self._parts["limits"]
        others = [s for s in parked(self._sequences) if s is not sequence]
        kept = [len(s.match.state.tokens) for s in others if s.match]
        kept += [len(s.processed_ids) for s in leaving]
        return len(running) < limits.max_rows and bool(limits.fits(sequence, running, kept))
