"""What a grammar leaves no choice about, proposed and not assumed.

Where the constraint spells out what must come (a key's name, punctuation), its spelling is drafted
and the target verifies it: another spelling of the same text may be legal too, and then the target
decides. So tokens are those of constrained decoding without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from pipeline.types import DraftRows, RowSampler, Target
from stages.drafters.history import HistoryRows
from stages.drafters.none import NoRow


class GrammarRows(HistoryRows[NoRow]):
    """Rows that keep nothing: what is forced is known to each row's own matcher."""

    def draft(
        self, pending: Seq[int], depths: Seq[int], samplers: Seq[RowSampler | None]
    ) -> list[list[int]]:
        return [
            sampler.matcher.forced(depth) if sampler is not None and depth else []
            for sampler, depth in zip(samplers, depths, strict=True)
        ]


class ForcedTokens:
    """Drafts the forced continuation of a row's constraint; nothing for rows without one."""

    can = frozenset({"refill", "external", "adapters"})
    needs = {"constraint": frozenset({"force"})}
    prefill = "tail"
    namespace = "grammar"
    taps: tuple[int, ...] = ()

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> DraftRows:
        return GrammarRows(NoRow)
