"""The turns of the owner thread: who starts, what runs, who leaves.

One turn is one prefill chunk, or as many of short prompts as the scheduler's token budget has room for,
and one decode round; while rows decode, they share that budget, so that a long prompt does not stall
them. Membership changes only between rounds
and in two steps, so that a failed preparation changes nothing. A fault in a step costs that batch
its rows, which are rebuilt from the token lists. A rebuilt row runs one round alone before it joins
others again: so a row that carries a fault fails without them, and every row gets on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from pipeline.drafting import book_faults, guarded
from pipeline.errors import HeadraceError
from pipeline.parking import park, parked, restart
from pipeline.siblings import share
from pipeline.trace import Telemetry, Totals, count_round, done, enter, leave
from pipeline.types import (
    Batch,
    Event,
    Failed,
    Sequence,
    Stage,
    State,
)
from pipeline.waiting import Waiting

MAX_ALONE = 1  # faults in a row that a row may have with no other row beside it


class Built(Protocol):
    """What the scheduler needs of a built pipeline."""

    parts: dict[str, Any]
    stages: dict[str, Stage]
    phases: dict[str, list[str]]


class Turns:
    """All requests that have been admitted, and the batches they run in. Owner thread only."""

    def __init__(self, pipeline: Built, telemetry: Telemetry, totals: Totals):
        self.pipeline, self.telemetry, self.totals = pipeline, telemetry, totals
        self.waiting = Waiting(pipeline.parts)
        self.prefills: deque[Batch] = deque()
        self.active = Batch([], None, None)  # type: ignore[arg-type]  # rows come with the first join

    # --- a turn

    @property
    def busy(self) -> bool:
        return bool(len(self.waiting) or self.prefills or self.active.sequences)

    @property
    def stalled(self) -> bool:
        """Whether all who have a row wait for saved states to be read."""
        return bool(self.prefills) and not self.active.sequences and all(map(reads, self.prefills))

    @property
    def rows_in_use(self) -> int:
        return len(self.running)

    @property
    def running(self) -> list[Sequence]:
        """Everybody who has a row."""
        return [s for batch in (self.active, *list(self.prefills)) for s in batch.sequences]

    def turn(self, *, admit: bool) -> None:
        """Drop who left, start who may, one prefill chunk, one decode round."""
        self._prune()
        if admit and len(self.waiting):
            for group in self.waiting.take(self.running):
                self._begin(group)
            self._make_way()
        self._prefill_some()
        if self.active.sequences:
            self._guard(self._decode, self.active)

    def _prefill_some(self) -> None:
        """A chunk each of the first prompts, until the turn's tokens are used up."""
        room = self._allowance()
        for batch in [batch for batch in self.prefills if not reads(batch)]:
            self.prefills = deque(other for other in self.prefills if other is not batch)
            batch.allowance = room
            self._guard(self._prefill, batch)
            room = batch.allowance
            if (
                not room
            ):  # None, nobody decodes: whoever is ready now need not wait for the next prompt
                return

    def _allowance(self) -> int | None:
        """Prompt tokens this turn may take, so that who decodes need not wait long for the next."""
        step = self.pipeline.parts["scheduler"].step_tokens
        decoding = sum(1 + len(s.proposal) for s in self.active.sequences)
        return None if step is None or not decoding else max(1, step - decoding)

    def fail_all(self, error: Exception) -> None:
        """The engine is going down: every open request gets `error`."""
        batches = [self.active, *self.prefills]
        for sequence in [*self.waiting, *(s for b in batches for s in b.sequences)]:
            sequence.deliver(Failed(error))
        self.waiting.clear()
        self.prefills = deque()
        self.active.sequences = []

    def close(self) -> None:
        """Free all rows."""
        for batch in (self.active, *self.prefills):
            if batch.rows is not None:
                batch.rows.close()
                batch.draft_rows.close()

    # --- starting

    def _prune(self) -> None:
        for sequence in self.waiting.take_ended():
            self._conclude(sequence)
        for batch in (self.active, *self.prefills):
            if not all(s.live for s in batch.sequences):
                self._guard(self._retire, batch)
        self.prefills = deque(b for b in self.prefills if b.sequences)

    def _make_way(self) -> None:
        """Park rows for a request of higher priority that waits at the front, and start it."""
        found = self.waiting.blocked(self.running, self.active.sequences)
        if found is None:
            return
        first, leaving = found
        self._guard(lambda batch: park(batch, leaving), self.active)
        if len(parked(leaving)) < len(leaving):
            return  # it failed: all rows are being rebuilt
        for sequence in leaving:
            self.waiting.append(sequence)
        self.totals.counts["parked"] += len(leaving)
        self._begin([self.waiting.take_one(first)])

    def _begin(self, sequences: list[Sequence]) -> None:
        """Give a group its rows; if that fails, the group fails and nothing else."""
        try:
            self.prefills.append(self._new_batch(sequences))
        except Exception as fault:
            for sequence in sequences:
                sequence.error = fault
                self._conclude(sequence)

    def rehearse(self) -> None:
        """Make rows once and free them, so that what the parts cannot store is known at open, and what
        a drafter cannot work with, which later would only cost speculation."""
        batch = self._new_batch([])
        told, _ = batch.draft_rows.faults()
        for half in (batch.draft_rows, batch.rows):
            half.close()
        if told:
            raise told[0].error

    def _new_batch(self, sequences: list[Sequence]) -> Batch:
        parts = self.pipeline.parts
        width = parts["depth"].max + 1
        rows = parts["kv"].rows(parts["model"], width)
        batch = Batch(sequences, rows, guarded(parts["drafter"], parts["model"], rows, width))
        for sequence in sequences:
            enter(sequence, batch)
        return batch

    # --- phases

    def _run(self, phase: str, batch: Batch) -> None:
        for name in self.pipeline.phases.get(phase, ()):
            began = time.perf_counter()
            self.pipeline.stages[name].run(batch)
            spent = time.perf_counter() - began
            batch.clock[name] = batch.clock.get(name, 0.0) + spent
            self.totals.step(phase, name, spent)
        book_faults(batch, self.totals, self.telemetry)

    def _prefill(self, batch: Batch) -> None:
        calls = self.pipeline.parts["model"].calls
        self._run("prefill", batch)
        calls = self.pipeline.parts["model"].calls - calls
        for sequence in batch.sequences:
            sequence.prompt_hidden = None  # it was of this chunk
            sequence.counts["target_calls"] = sequence.counts.get("target_calls", 0) + calls
        self._part(batch)
        self._share(batch)
        self._end_undecoded(batch)
        if any(s.ready and s.scores is not None for s in batch.sequences):
            self._run("first", batch)
            self._mark_tokens(batch)
            self._retire(batch)
        if batch.sequences and all(s.ready and "suspect" in s.counts for s in batch.sequences):
            self._decode(batch)
        self._join(batch)
        if batch.sequences and batch is not self.active:
            self.prefills.append(batch)

    def _part(self, batch: Batch) -> None:
        """Rows whose saved state is being read wait for it alone."""
        late = [s for s in batch.sequences if s.restore is not None]
        for sequence in late if len(late) < len(batch.sequences) else late[1:]:
            batch.sequences = [s for s in batch.sequences if s is not sequence]
            leave(sequence, batch)
            self._begin([sequence])

    def _share(self, batch: Batch) -> None:
        """Choices of one prompt start where it is in; what cannot be shared costs them their own prefill."""
        try:
            share(batch, list(self.waiting))
        except Exception:
            logging.getLogger(__name__).info("a prompt was not shared", exc_info=True)

    def _end_undecoded(self, batch: Batch) -> None:
        """Rows that asked for no token, and all rows of a flow that decodes none, end with the prompt."""
        decodes = bool(self.pipeline.phases.get("decode"))
        ending = [s for s in batch.sequences if s.live and s.ready and not (decodes and s.max_new)]
        for sequence in ending:
            sequence.finish_reason = "length"
        if ending:
            self._retire(batch)

    def _decode(self, batch: Batch) -> None:
        began, drafting = time.perf_counter(), batch.clock.get("draft", 0.0)
        self._run("decode", batch)
        seconds = time.perf_counter() - began
        self.telemetry.round(batch)
        for sequence in batch.sequences:
            count_round(sequence, self.totals)
            sequence.counts.pop("suspect", None)
            sequence.counts.pop("faults_alone", None)
        self.totals.round(batch, seconds - batch.clock.get("draft", 0.0) + drafting)
        self.pipeline.parts["depth"].observe(batch, time.perf_counter() - began)
        self._mark_tokens(batch)
        self._retire(batch)

    def _mark_tokens(self, batch: Batch) -> None:
        """Book what accept has emitted, before rows leave."""
        for sequence in batch.sequences:
            self.totals.counts["emitted_tokens"] += len(sequence.emitted)
            if "ttft" not in sequence.timings and sequence.output_ids:
                sequence.timings["ttft"] = time.perf_counter() - sequence.submitted

    # --- joining and leaving

    def _join(self, batch: Batch) -> None:
        """Move ready rows of a prefill batch into the active one, all or nothing."""
        ready = [row for row, s in enumerate(batch.sequences) if s.ready]
        if not ready:
            return
        batch.drop_ahead()
        for row in ready:
            batch.sequences[row].scores = None
        if not self.active.sequences and len(ready) == len(batch.sequences):
            self._replace_active(batch)  # nothing is copied
            return
        self.active.drop_ahead()
        joining = [batch.sequences[row] for row in ready]
        states = [self._extract(batch, row) for row in ready]
        drafts = [batch.draft_rows.capture(row) for row in ready]
        self._append(joining, states, drafts)
        stay = [row for row in range(len(batch.sequences)) if row not in ready]
        batch.rows.filter(stay)
        batch.draft_rows.filter(stay)
        batch.sequences = [batch.sequences[row] for row in stay]
        for sequence in joining:
            leave(sequence, batch)
            enter(sequence, self.active)

    def _extract(self, batch: Batch, row: int) -> State | None:
        sequence = batch.sequences[row]
        if not sequence.processed_ids:  # a prompt of one token
            return None
        return batch.rows.extract(row, sequence.processed_ids, sequence.namespace)

    def _append(self, joining: list[Sequence], states: list[Any], drafts: list[Any]) -> None:
        if not self.active.sequences:
            self._replace_active(self._new_batch([]))
        changes: list[Any] = []
        try:
            changes.append(self.active.rows.prepare_append(states))
            ids = [s.processed_ids for s in joining]
            changes.append(self.active.draft_rows.prepare_append(ids, drafts))
            for change in changes:
                change.commit()
            self.active.sequences = [*self.active.sequences, *joining]
        finally:
            for change in changes:
                change.dispose()

    def _replace_active(self, batch: Batch) -> None:
        old, self.active = self.active, batch
        if old.rows is not None:
            old.rows.close()
            old.draft_rows.close()

    def _retire(self, batch: Batch) -> None:
        """Publish and remove the rows that have ended."""
        # decided once: another thread may cancel a row at any moment
        alive = [s.live for s in batch.sequences]
        if all(alive):
            return
        batch.drop_ahead()
        if batch.rows.size:
            self._run("finish", batch)
            keep = [row for row, stays in enumerate(alive) if stays]
            batch.rows.filter(keep)
            batch.draft_rows.filter(keep)
        sequences = list(zip(batch.sequences, alive, strict=True))
        batch.sequences = [sequence for sequence, stays in sequences if stays]
        for sequence in (sequence for sequence, stays in sequences if not stays):
            leave(sequence, batch)
            self._conclude(sequence)

    def _conclude(self, sequence: Sequence) -> None:
        """The sequence's last event; it lets go of all that is heavy."""
        self.pipeline.parts["scheduler"].finished(sequence)
        sequence.drop_match()
        sequence.scores = sequence.sampler = sequence.text_state = None
        sequence.prompt_hidden = sequence.score_state = sequence.progress = None
        outcome = "cancelled" if sequence.cancelled else "failed" if sequence.error else "finished"
        self.totals.counts[f"requests_{outcome}"] += 1
        self.totals.counts["completion_tokens"] += len(sequence.output_ids)
        self.totals.counts["prompt_tokens"] += len(sequence.prompt_ids)
        self.totals.counts["cached_tokens"] += sequence.cached_len
        self.totals.counts["resumed_tokens"] += sequence.resumed_len
        if sequence.error is not None and not sequence.cancelled:
            sequence.deliver(Failed(sequence.error))
        else:
            sequence.deliver(done(sequence))

    # --- faults

    def _guard(self, step: Callable[[Batch], None], batch: Batch) -> None:
        try:
            step(batch)
        except Exception as fault:
            self.totals.counts["faults"] += 1
            logging.getLogger(__name__).warning(
                "a step failed; its rows are rebuilt", exc_info=fault
            )
            self._rebuild(batch, fault)

    def _rebuild(self, batch: Batch, fault: Exception) -> None:
        """The batch's rows are lost: each sequence starts again alone, from its token lists."""
        sequences, batch.sequences = batch.sequences, []
        for half in (batch.rows, batch.draft_rows):
            if half is not None:
                half.close()
        batch.round, batch.ahead = None, None
        if batch is self.active:
            self.active = Batch([], None, None)  # type: ignore[arg-type]
        alone = len(sequences) == 1
        for sequence in sequences:
            leave(sequence, batch)
            if alone:
                sequence.counts["faults_alone"] = sequence.counts.get("faults_alone", 0) + 1
            if sequence.live and alone and _hopeless(sequence, fault):
                sequence.error = fault
            if not sequence.live:
                self._conclude(sequence)
                continue
            try:
                restart(sequence)
                sequence.drop_match()
                if sequence.sampler is not None:
                    sequence.sampler.restart(sequence.output_ids)
            except Exception as error:  # a constraint that cannot be replayed is this row's fault
                sequence.error = error
                self._conclude(sequence)
                continue
            sequence.counts["suspect"] = 1
            self._begin([sequence])


def reads(batch: Batch) -> bool:
    """Whether saved states of its rows are still being read."""
    return any(s.restore is not None and not s.restore.done() for s in batch.sequences)


def _hopeless(sequence: Sequence, fault: Exception) -> bool:
    return isinstance(fault, HeadraceError) or sequence.counts["faults_alone"] > MAX_ALONE


def nobody(event: Event) -> None:
    """To whom a sequence delivers that has had its last event."""
