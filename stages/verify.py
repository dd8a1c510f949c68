"""Score each row's pending token and proposal in one target pass."""

from __future__ import annotations

from typing import Any

from pipeline.types import Adapters, Batch, Drafter, Round, Target
from stages.scores import Scores, WindowScores


class Verify:
    """One forward over `[pending] + proposal` of every row.

    What the drafter's taps see in it goes to commit. When no row has a proposal, the graph of the
    next plain round is built while this one computes (building takes a tenth of a pass on a CPU);
    its token ids are filled in when they are known. It is thrown away if the next round turns out
    otherwise.
    """

    reads = frozenset({"pending", "proposal", "adapters"})
    writes = frozenset({"scores"})
    needs = {"kv": frozenset({"rewind", "batch"})}
    thread = "owner"

    def __init__(
        self, target: Target, drafter: Drafter, adapters: Adapters, *, build_ahead: bool = True
    ):
        self.target, self.drafter, self.adapters = target, drafter, adapters
        self.build_ahead = build_ahead

    def run(self, batch: Batch) -> None:
        windows = [[s.pending, *s.proposal] for s in batch.sequences]
        plain = all(len(window) == 1 for window in windows)
        if plain and batch.ahead is not None:
            batch.round, scores, seen = batch.ahead
            batch.ahead = None
            batch.round.feed([window[0] for window in windows])
        else:
            batch.drop_ahead()
            batch.round, scores, seen = self._forward(batch, batch.rows.begin(windows))
        batch.round.launch(scores.device, *([] if seen is None else [seen]))
        batch.draft_hidden = seen
        self.target.calls += 1
        for row, sequence in enumerate(batch.sequences):
            sequence.scores = WindowScores(scores, row, batch.round.columns(row))
        if plain and self.build_ahead:
            batch.ahead = self._forward(batch, batch.rows.begin_ahead())

    def _forward(self, batch: Batch, round: Round) -> tuple[Round, Scores, Any]:
        with self.adapters.worn([sequence.adapters or () for sequence in batch.sequences]):
            hidden_BWD, seen = look(self.target, round, self.drafter.taps)
        return round, Scores(self.target.head(hidden_BWD)), seen


def look(target: Target, round: Round, taps: Any) -> tuple[Any, Any]:
    """The round's hidden_BWD and what the taps see of it; None without taps."""
    if not taps:
        return target.hidden(round.tokens_BW, round.caches), None
    starts = {round.columns(row).start for row in range(len(round.widths))}
    assert starts <= {0}, "taps want each row's outputs in its first columns"
    return target.tapped(round.tokens_BW, round.caches, taps)
