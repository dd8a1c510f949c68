"""A drafter's faults cost speculation, never an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.types import Attachment, Batch, Change, Drafter, DraftRows, Target


class GuardedRows:
    """Draft rows that survive their drafter: after a fault they propose nothing and take nothing
    until `mend` has made them again from the batch's token lists."""

    def __init__(self, make: Callable[[], DraftRows]):
        self._make = make
        self._rows = make()
        self.broken = False

    @property
    def size(self) -> int:
        return self._rows.size

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take(self._rows.prefill, tokens, hidden)

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        if self.broken:
            return [[] for _ in pending]
        try:
            return self._rows.draft(pending, depths, samplers)
        except Exception:
            self.broken = True
            raise

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take(self._rows.commit, inputs, hidden)

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take(self._rows.consume, inputs, hidden)

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        return _Nothing() if self.broken else self._rows.prepare_append(tokens, attachments)

    def filter(self, keep: Seq[int]) -> None:
        self._take(self._rows.filter, keep)

    def capture(self, row: int) -> Attachment | None:
        return None if self.broken else self._rows.capture(row)

    def check_integrity(self) -> None:
        if not self.broken:
            self._rows.check_integrity()

    def close(self) -> None:
        self._rows.close()

    def mend(self, batch: Batch) -> None:
        """Start again from what the target's rows hold; stay broken if that fails too."""
        for sequence in batch.sequences:
            sequence.counts["draft_errors"] = sequence.counts.get("draft_errors", 0) + 1
        try:
            self._rows.close()
            self._rows = self._make()
            held = [sequence.processed_ids for sequence in batch.sequences]
            self._rows.prepare_append(held, [None] * len(held)).commit()
            self.broken = False
        except Exception:
            logging.getLogger(__name__).warning("the drafter cannot start again", exc_info=True)

    def _take(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.broken:
            return
        try:
            call(*arguments)
        except Exception:
            logging.getLogger(__name__).warning("the drafter failed", exc_info=True)
            self.broken = True


class _Nothing:
    """The change that changes nothing."""

    def commit(self) -> None: ...
    def dispose(self) -> None: ...


def guarded(drafter: Drafter, target: Target, max_width: int) -> GuardedRows:
    """The drafter's rows for one batch."""
    return GuardedRows(lambda: drafter.rows(target, max_width))
