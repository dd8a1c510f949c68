"""Make the round's outcome the rows' state: the target's first, then the drafter's."""

from __future__ import annotations

from pipeline.types import Batch


class Commit:
    """Resolve the open round with what was delivered and roll the rest back.

    A batch without a round (token 0 of a `full` drafter's prefill) only learns its next input.
    """

    reads = frozenset(
        {"pending", "depth", "proposal", "emitted", "kept", "processed_ids", "finish_reason"}
    )
    writes = frozenset({"pending", "processed_ids"})
    needs = {"kv": frozenset({"rewind"})}
    thread = "owner"

    def __init__(self) -> None:
        pass

    def run(self, batch: Batch) -> None:
        if batch.round is not None:
            self._resolve(batch)
        for sequence in batch.sequences:
            if sequence.finish_reason is None and sequence.emitted:
                sequence.pending = sequence.emitted[-1].token_id

    def _resolve(self, batch: Batch) -> None:
        kept = [[s.pending, *s.proposal][: s.kept] for s in batch.sequences]
        assert batch.round is not None
        if any(len(ids) != width for ids, width in zip(kept, batch.round.widths, strict=True)):
            batch.drop_ahead()
        batch.round.resolve([len(ids) for ids in kept])
        batch.round = None
        drafted = any(s.depth for s in batch.sequences)
        take = batch.draft_rows.commit if drafted else batch.draft_rows.consume
        take(kept, batch.draft_hidden)
        for sequence, ids in zip(batch.sequences, kept, strict=True):
            sequence.processed_ids += ids
