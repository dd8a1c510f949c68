"""Write saved states to slower tiers while nothing runs."""

from __future__ import annotations

from pipeline.types import Batch, Tier


class Spill:
    """Idle work of the tiers, bounded steps that are repeated while nobody waits. RAM has none."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    needs: dict[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, tier: list[Tier]):
        self.tiers = tier

    def run(self, batch: Batch) -> None:
        for tier in self.tiers:
            tier.idle_step()
