"""Score each row's pending token and proposal in one target pass."""

from __future__ import annotations

from typing import Any

from pipeline.types import Batch, Round, Target
from stages.scores import Scores, WindowScores


class Verify:
    """One forward over `[pending] + proposal` of every row.

    When no row has a proposal, the graph of the next plain round is built while this one computes
    (building takes a tenth of a pass on a CPU); its token ids are filled in when they are known. It
    is thrown away if the next round turns out otherwise.
    """

    reads = frozenset({"pending", "proposal"})
    writes = frozenset({"scores"})
    needs = {"kv": frozenset({"rewind", "batch"})}
    thread = "owner"

    def __init__(self, target: Target, *, build_ahead: bool = True):
        self.target = target
        self.build_ahead = build_ahead

    def run(self, batch: Batch) -> None:
        windows = [[s.pending, *s.proposal] for s in batch.sequences]
        plain = all(len(window) == 1 for window in windows)
        logits_BWV: Any = None
        if plain:
            batch.round, logits_BWV = self._take_ahead(batch, windows)
        if batch.round is None:
            batch.drop_ahead()
            batch.round, logits_BWV = self._forward(batch, batch.rows.begin(windows))
        scores = Scores(logits_BWV)
        batch.round.launch(scores.device)
        self.target.calls += 1
        for row, sequence in enumerate(batch.sequences):
            sequence.scores = WindowScores(scores, row, batch.round.columns(row))
        if plain and self.build_ahead:
            batch.ahead = self._forward(batch, batch.rows.begin_ahead())

    def _take_ahead(self, batch: Batch, windows: list[list[int]]) -> tuple[Round | None, Any]:
        if batch.ahead is None:
            return None, None
        round, logits_BWV = batch.ahead
        batch.ahead = None
        round.feed([window[0] for window in windows])
        return round, logits_BWV

    def _forward(self, batch: Batch, round: Round) -> tuple[Round, Any]:
        hidden_BWD = self.target.hidden(round.tokens_BW, round.caches)
        return round, self.target.head(hidden_BWD)
