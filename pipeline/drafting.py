"""The drafter's side of a batch: its rows, and what became of them."""

from __future__ import annotations

import logging

from pipeline.trace import Telemetry, Totals
from pipeline.types import Batch, Drafter, GuardedRows, Rows, Target


def guarded(drafter: Drafter, target: Target, rows: Rows, max_width: int) -> GuardedRows:
    """The drafter's rows for one batch, whose target rows are `rows`."""
    made = GuardedRows(lambda: drafter.rows(target, max_width), target.vocab_size)
    made.watch(rows)
    return made


def book_faults(batch: Batch, totals: Totals, telemetry: Telemetry) -> None:
    """What has failed in the drafter since the last time, told and counted on the rows concerned."""
    told, counts = batch.draft_rows.faults()
    for fault in told:
        totals.counts["draft_faults"] += 1
        telemetry.draft_fault(str(fault))
        logging.getLogger(__name__).warning(
            "the drafter failed (%s); rows %s go on without",
            fault.where, list(fault.rows), exc_info=fault.error,
        )  # fmt: skip
    for sequence, count in zip(batch.sequences, counts, strict=False):  # they may not have joined
        if count:
            sequence.counts["draft_errors"] = sequence.counts.get("draft_errors", 0) + count
