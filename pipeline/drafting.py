"""A drafter's faults cost speculation, never an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.types import Attachment, Batch, Change, Drafter, DraftRows, Rows, Target

MAX_MENDS = 8  # a batch's draft rows are made again at most this often: each costs O(history)


class GuardedRows:
    """Draft rows that survive their drafter: after a fault they propose nothing and take nothing
    until `mend` has made them again from the batch's token lists. After `MAX_MENDS` they stay so."""

    def __init__(self, make: Callable[[], DraftRows], vocab_size: int):
        self._make = make
        self._rows: DraftRows | None = None  # None: they could not be made
        self._vocab_size = vocab_size
        self._mends = 0
        self.broken = False
        try:
            self._rows = make()
        except Exception:
            self._fail()

    @property
    def size(self) -> int:
        return 0 if self._rows is None else self._rows.size

    def assign(self, namespaces: Seq[str]) -> None:
        if hasattr(self._rows, "assign"):
            self._take("assign", namespaces)

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("prefill", tokens, hidden)

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        if self._rows is None or self.broken:
            return [[] for _ in pending]
        try:
            proposals = self._rows.draft(pending, depths, samplers)
            self._check(proposals, depths)
        except Exception:
            self.broken = True
            raise
        return proposals

    def _check(self, proposals: list[list[int]], depths: Seq[int]) -> None:
        for proposal, depth in zip(proposals, depths, strict=True):
            inside = all(0 <= token < self._vocab_size for token in proposal)
            assert inside and len(proposal) <= depth, f"proposed {proposal} at depth {depth}"

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("commit", inputs, hidden)

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("consume", inputs, hidden)

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        if self._rows is None or self.broken:
            return _Nothing()
        try:
            return self._rows.prepare_append(tokens, attachments)
        except Exception:
            self._fail()
            return _Nothing()

    def filter(self, keep: Seq[int]) -> None:
        self._take("filter", keep)

    def capture(self, row: int) -> Attachment | None:
        if self._rows is None or self.broken:
            return None
        try:
            return self._rows.capture(row)
        except Exception:
            self._fail()
            return None

    def check_integrity(self) -> None:
        if self._rows is not None and not self.broken:
            self._rows.check_integrity()

    def close(self) -> None:
        try:
            if self._rows is not None:
                self._rows.close()
        except Exception:
            self._fail()

    def mend(self, batch: Batch) -> None:
        """If broken, start again from what the target's rows hold."""
        if not self.broken or self._mends == MAX_MENDS:
            return
        self._mends += 1
        self.close()
        try:
            self._rows = rows = self._make()
            held = [sequence.processed_ids for sequence in batch.sequences]
            rows.prepare_append(held, [None] * len(held)).commit()
            self.broken = False
        except Exception:
            logging.getLogger(__name__).warning("the drafter cannot start again", exc_info=True)

    def _take(self, method: str, *arguments: Any) -> None:
        if self.broken:
            return
        try:
            getattr(self._rows, method)(*arguments)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        logging.getLogger(__name__).warning("the drafter failed", exc_info=True)
        self.broken = True


class _Nothing:
    """The change that changes nothing."""

    def commit(self) -> None: ...
    def dispose(self) -> None: ...


def guarded(drafter: Drafter, target: Target, rows: Rows, max_width: int) -> GuardedRows:
    """The drafter's rows for one batch, whose target rows are `rows`."""
    return GuardedRows(lambda: drafting(drafter, target, rows, max_width), target.vocab_size)


def drafting(drafter: Drafter, target: Target, rows: Rows, max_width: int) -> DraftRows:
    """Empty rows that know the target's, where they want to."""
    made = drafter.rows(target, max_width)
    getattr(made, "watch", lambda _: None)(rows)
    return made
