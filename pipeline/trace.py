"""What happened in each round, for people and for /stats."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import refuse
from pipeline.types import Batch, Done, Sequence, Speculation, Usage


class Telemetry:
    """Settings of group `telemetry`. With `trace`, prints each round's feed, proposal and outcome
    to standard error, one line a row. With `recount`, every round ends with a recount of all rows;
    what does not add up is an AssertionError, which costs the rows and is logged. With `spans` a server
    sends an OpenTelemetry span for each request to `endpoint`, with `content` also what was asked and
    answered. ValueError for an address that is none."""

    def __init__(
        self,
        *,
        trace: bool = False,
        recount: bool = False,
        spans: bool = False,
        endpoint: str | None = None,
        content: bool = False,
    ):
        self.trace, self.recount = trace, recount
        self.spans, self.endpoint, self.content = spans, endpoint, content
        refuse(endpoint="" if endpoint is None else _no_endpoint(endpoint))

    def round(self, batch: Batch) -> None:
        """Called when a round has been committed."""
        if self.recount:
            batch.rows.check_integrity()
            batch.draft_rows.check_integrity()
            held = [len(s.processed_ids) for s in batch.sequences]
            assert list(batch.rows.lengths) == held, (batch.rows.lengths, held)
        if self.trace:
            self._print(batch)

    def draft_fault(self, what: str) -> None:
        """Called once for each fault of the drafter, which cost some rows their speculation."""
        if self.trace:
            print(f"drafter failed in {what}", file=sys.stderr)

    def _print(self, batch: Batch) -> None:
        """What was fed is the tail of what the rows hold. On a terminal an answer's text may have left
        the cursor in the middle of a line."""
        start = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
        for sequence in batch.sequences:
            fed = sequence.processed_ids[len(sequence.processed_ids) - sequence.kept :]
            emitted = [e.token_id for e in sequence.emitted]
            if not sequence.counts.get("rounds"):
                print(f"{start}{_reuse(sequence)}", file=sys.stderr)
            print(
                f"{start}{sequence.request.id} round {sequence.counts.get('rounds', 0)}: feed {fed} "
                f"proposed {sequence.proposal} accepted {sequence.accepted} emitted {emitted}",
                file=sys.stderr,
            )


def _no_endpoint(said: str) -> str:
    """Why spans cannot be sent there; empty if they can."""
    try:
        parts = urlsplit(said)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    return "" if fine else f"wants http://host:4318/v1/traces, got {said!r}"


def _reuse(sequence: Sequence) -> str:
    """What the prompt began from, and where it parts from what is saved."""
    size, same = len(sequence.prompt_ids), sequence.agreed_len
    parts = f", token {same} is the first that no saved state has there" if same < size else ""
    return f"{sequence.request.id} starts from {sequence.cached_len} of {size} prompt tokens{parts}"


@dataclass
class Totals:
    """Counters since the engine opened. Read by anybody; written by the owner, what belongs to `admit`
    by the preparation pool."""

    counts: Counter[str] = field(default_factory=Counter)
    # (phase, stage) -> runs, seconds
    steps: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    # (rows, longest proposal + 1) -> rounds, seconds of them without drafting
    widths: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)

    def step(self, phase: str, stage: str, seconds: float) -> None:
        """Book a stage's run."""
        runs, spent = self.steps.get((phase, stage), (0, 0.0))
        self.steps[phase, stage] = (runs + 1, spent + seconds)

    def round(self, batch: Batch, seconds: float) -> None:
        """Book a round that has been committed; `seconds` are all but the drafter's."""
        self.counts["rounds"] += 1
        proposed = max((len(s.proposal) for s in batch.sequences), default=0)
        at = (len(batch.sequences), 1 + proposed)
        rounds, spent = self.widths.get(at, (0, 0.0))
        self.widths[at] = (rounds + 1, spent + seconds)

    def as_dict(self) -> dict[str, Any]:
        widths = [
            {"rows": rows, "width": width, "rounds": rounds, "seconds": seconds}
            for (rows, width), (rounds, seconds) in sorted(dict(self.widths).items())
        ]
        return {
            "counts": dict(self.counts),
            **self._times(),
            "widths": widths,
            "drafted_by_position": list(self.drafted_by_position),
            "accepted_by_position": list(self.accepted_by_position),
        }

    def _times(self) -> dict[str, Any]:
        """Seconds by stage, and of each phase runs and seconds by stage."""
        seconds: dict[str, float] = {}
        phases: dict[str, dict[str, Any]] = {}
        for (phase, stage), (runs, spent) in dict(self.steps).items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
            phases.setdefault(phase, {})[stage] = {"runs": runs, "seconds": spent}
        return {"stage_seconds": seconds, "phases": phases}


def enter(sequence: Sequence, batch: Batch) -> None:
    """The sequence shares the batch's time from now on; its first batch ends its time in the queue."""
    sequence.timings.setdefault("queue", time.perf_counter() - sequence.submitted)
    sequence.entered = dict(batch.clock)


def leave(sequence: Sequence, batch: Batch) -> None:
    """Add the time by stage that the batch took since the sequence entered it."""
    for stage, seconds in batch.clock.items():
        spent = seconds - sequence.entered.get(stage, 0.0)
        sequence.timings[stage] = sequence.timings.get(stage, 0.0) + spent


def count_round(sequence: Sequence, totals: Totals) -> None:
    """Book one decode round of a row: what was drafted, accepted and delivered."""
    drafted, accepted = len(sequence.proposal), sequence.accepted
    counts = sequence.counts
    counts["rounds"] = counts.get("rounds", 0) + 1
    counts["target_calls"] = counts.get("target_calls", 0) + 1
    if not drafted:
        return
    counts["drafted"] = counts.get("drafted", 0) + drafted
    counts["accepted"] = counts.get("accepted", 0) + accepted
    totals.counts["drafted"] += drafted
    totals.counts["accepted"] += accepted
    for books in (sequence, totals):
        _add_positions(books.drafted_by_position, drafted)
        _add_positions(books.accepted_by_position, accepted)


def _add_positions(by_position: list[int], length: int) -> None:
    by_position.extend([0] * (length - len(by_position)))
    for position in range(length):
        by_position[position] += 1


def speculation(sequence: Sequence) -> Speculation:
    """The figures of one request, for its last event."""
    counts = sequence.counts
    accepted = list(sequence.accepted_by_position)
    accepted += [0] * (len(sequence.drafted_by_position) - len(accepted))
    return Speculation(
        rounds=counts.get("rounds", 0),
        drafted=counts.get("drafted", 0),
        accepted=counts.get("accepted", 0),
        drafted_by_position=tuple(sequence.drafted_by_position),
        accepted_by_position=tuple(accepted),
        target_calls=counts.get("target_calls", 0),
    )


def done(sequence: Sequence) -> Done:
    """The last event of a sequence that did not fail."""
    counts = len(sequence.prompt_ids), len(sequence.output_ids)
    usage = Usage(*counts, sequence.cached_len, sequence.resumed_len, sequence.agreed_len)
    timings = {**sequence.timings, "total": time.perf_counter() - sequence.submitted}
    reason = "cancelled" if sequence.cancelled else sequence.finish_reason
    assert reason is not None
    told = (timings, speculation(sequence), sequence.scored_prompt, sequence.stop_string)
    return Done(reason, usage, sequence.seed, *told)
