"""The queue: admitted requests without a row, and who of them starts next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.types import Sequence


class Waiting:
    """Asks the scheduler for the order and the limits for room. Owner thread only, but for `len`.

    Only the front may start: one that does not fit yet holds up all behind it, so that it cannot be
    overtaken for ever by smaller ones.
    """

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = parts
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

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
        """Those that may start beside `running`; prompts of one length prefill together."""
        scheduler, limits = self._parts["scheduler"], self._parts["limits"]
        if not self._sequences or len(running) >= limits.max_rows:
            return []
        groups: dict[int, list[Sequence]] = {}
        running = list(running)
        for sequence in scheduler.order(self._sequences, running):
            if len(running) >= limits.max_rows or not limits.fits(sequence, running):
                break
            self._sequences.remove(sequence)
            scheduler.started(sequence)
            running.append(sequence)
            sequence.timings["queue"] = time.perf_counter() - sequence.submitted
            groups.setdefault(len(sequence.prompt_ids), []).append(sequence)
        return list(groups.values())
