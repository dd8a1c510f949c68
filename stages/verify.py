"""Score each row's pending token and proposal in one target pass."""

from __future__ import annotations

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
        if plain and batch.ahead is not None:
            batch.round, scores = batch.ahead
            batch.ahead = None
            batch.round.feed([window[0] for window in windows])
        else:
            batch.drop_ahead()
            batch.round, scores = self._forward(batch.rows.begin(windows))
        batch.round.launch(scores.device)
        self.target.calls += 1
        for row, sequence in enumerate(batch.sequences):
            sequence.scores = WindowScores(scores, row, batch.round.columns(row))
        if plain and self.build_ahead:
            batch.ahead = self._forward(batch.rows.begin_ahead())

    def _forward(self, round: Round) -> tuple[Round, Scores]:
        hidden_BWD = self.target.hidden(round.tokens_BW, round.caches)
        return round, Scores(self.target.head(hidden_BWD))
