"""Run the rest of the prompt through the target, chunk by chunk."""

from __future__ import annotations

import mlx.core as mx

from pipeline.errors import below, refuse
from pipeline.types import Adapters, Attachment, Batch, Drafter, Rows, Sequence, State, Target, Tier
from stages.prompt_scores import score_chunk
from stages.scores import Scores, WindowScores
from stages.verify import look

REUSED = 64  # tokens; up to about this width the next pass's temporaries fit into this one's


class ChunkedPrefill:
    """One chunk of every row of a prefill batch; called until all its rows are `ready`.

    What the rows must hold comes from the token lists alone, so that rows lost to a fault are
    rebuilt here too. The last token stays pending and heads the first round. For a drafter with
    `prefill = "full"`, and where a saved state leaves less than a chunk to do (one pass is then the
    whole way to the first token), a fresh prompt is processed whole and token 0 is drawn from the
    last position's scores. The rows of a batch share the chunk, and while other rows decode no more
    of it than the batch's `allowance`. Where layers cannot be cut later, a chunk ends at every
    `snapshot_tokens`-th token and at the boundary, whose states are to be published. Rows that want
    the log-probabilities of their prompt have each chunk's scores reduced before the next.
    """

    reads = frozenset(
        {"request", "prompt_ids", "output_ids", "boundary", "cached_len", "match", "namespace",
         "adapters", "pending", "processed_ids", "prompt_logprobs", "restore"}
    )  # fmt: skip
    writes = frozenset(
        {
            "processed_ids",
            "pending",
            "scores",
            "match",
            "prompt_logprobs",
            "prompt_hidden",
            "snapshot_len",
        }
    )
    needs = {"kv": frozenset({"batch"})}
    thread = "owner"

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        adapters: Adapters,
        tier: list[Tier],
        *,
        chunk: int = 512,
        snapshot_tokens: int = 1024,
    ):
        refuse(chunk=below(chunk, 1, "tokens"), snapshot_tokens=below(snapshot_tokens, 1, "tokens"))
        self.snapshot_tokens = snapshot_tokens
        self.target, self.drafter, self.adapters = target, drafter, adapters
        self.tiers, self.chunk = tier, chunk

    def run(self, batch: Batch) -> None:
        if any(sequence.restore is not None for sequence in batch.sequences):
            return  # what they start from is being read
        if batch.rows.size == 0:
            self._populate(batch)
        goals = [self._goal(sequence) for sequence in batch.sequences]
        pairs = zip(batch.sequences, goals, strict=True)
        width = min(self._next_width(batch.rows, *pair) for pair in pairs)
        room = min(self.chunk, batch.allowance or self.chunk)
        width = min(width, max(1, room // len(batch.sequences)))
        if width:
            self._step(batch, goals, width)
        if batch.allowance is not None:
            batch.allowance = max(0, batch.allowance - width * len(goals))
        for sequence, goal in zip(batch.sequences, goals, strict=True):
            sequence.ready = len(sequence.processed_ids) == len(goal)

    def _goal(self, sequence: Sequence) -> list[int]:
        """All tokens the rows must hold before this row decodes."""
        known = sequence.prompt_ids + sequence.output_ids
        return known if self._draws_first(sequence) else known[:-1]

    def _draws_first(self, sequence: Sequence) -> bool:
        """Whether token 0 is drawn from the last prompt token's scores."""
        if sequence.output_ids:
            return False
        left = len(sequence.prompt_ids) - len(sequence.processed_ids)
        alone = sequence.request.group is None  # else its state is for its siblings too
        short = alone and sequence.cached_len > 0 and left <= self._chunk(sequence)
        return self.drafter.prefill == "full" or short

    def _chunk(self, sequence: Sequence) -> int:
        asked = sequence.request.prefill_chunk
        return asked or self.target.prefill_chunk(len(sequence.prompt_ids)) or self.chunk

    def _next_width(self, rows: Rows, sequence: Sequence, goal: list[int]) -> int:
        done, chunk = len(sequence.processed_ids), self._chunk(sequence)
        sequence.snapshot_len = self._next_snapshot(rows, sequence, done)
        snapshot = sequence.snapshot_len - done
        return min(chunk, len(goal) - done, snapshot if snapshot > 0 else chunk)

    def _next_snapshot(self, rows: Rows, sequence: Sequence, done: int) -> int:
        """Where the next state is due that could not be cut out of a later one; 0: nowhere."""
        later = rows.cuttable_later(sequence.boundary)
        if later or not self.tiers or done >= sequence.boundary:
            return 0
        return min(sequence.boundary, (done // self.snapshot_tokens + 1) * self.snapshot_tokens)

    def _step(self, batch: Batch, goals: list[list[int]], width: int) -> None:
        chunks = [
            goal[len(s.processed_ids) :][:width]
            for s, goal in zip(batch.sequences, goals, strict=True)
        ]
        round = batch.rows.begin(chunks)
        with self.adapters.worn([sequence.adapters or () for sequence in batch.sequences]):
            hidden_BWD, seen = look(self.target, round, self.drafter.taps)
        last = self._last_scores(batch, goals, width, hidden_BWD)
        scored = [s.request.prompt_logprobs is not None for s in batch.sequences]
        shown = ([hidden_BWD] if any(scored) else []) + ([] if seen is None else [seen])
        round.launch(*last, *shown)
        self.target.calls += 1
        round.wait()
        round.resolve([width] * len(chunks))
        for row, sequence in enumerate(batch.sequences):
            if scored[row]:
                score_chunk(self.target, sequence, hidden_BWD[row])
        batch.draft_rows.prefill(chunks, seen)
        for sequence, chunk in zip(batch.sequences, chunks, strict=True):
            sequence.processed_ids += chunk
        if width > REUSED:
            mx.clear_cache()  # temporaries of this width may not be wanted again

    def _last_scores(
        self, batch: Batch, goals: list[list[int]], width: int, hidden_BWD: mx.array
    ) -> list[mx.array]:
        """Scores of the last column, for rows that end with it and draw token 0 from it."""
        ending = [
            row
            for row, (sequence, goal) in enumerate(zip(batch.sequences, goals, strict=True))
            if self._draws_first(sequence) and len(sequence.processed_ids) + width == len(goal)
        ]
        if not ending:
            return []
        scores = Scores(self.target.head(hidden_BWD[:, -1:]))
        for row in ending:
            batch.sequences[row].scores = WindowScores(scores, row, slice(0, 1))
        return [scores.device]

    def _populate(self, batch: Batch) -> None:
        """Give the batch its rows, from saved states where there are any."""
        states = [self._borrowed(sequence) for sequence in batch.sequences]
        tokens = [list(state.tokens) if state else [] for state in states]
        attachments = [self._attachment(state) for state in states]
        changes = [
            batch.rows.prepare_append(states),
            batch.draft_rows.prepare_append(tokens, attachments),
        ]
        for change in changes:
            change.commit()
            change.dispose()
        for sequence, ids in zip(batch.sequences, tokens, strict=True):
            sequence.processed_ids = ids
            sequence.pending = (sequence.prompt_ids + sequence.output_ids)[-1]
            sequence.drop_match()

    def _attachment(self, state: State | None) -> Attachment | None:
        """What this drafter left with the state; states may hold other drafters' too."""
        found = () if state is None else state.attachments
        return next((a for a in found if a.namespace == self.drafter.namespace), None)

    def _borrowed(self, sequence: Sequence) -> State | None:
        return sequence.match.state if sequence.match is not None else None
