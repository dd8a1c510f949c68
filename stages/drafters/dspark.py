"""DSpark drafters, and DFlash ones of DeepSpec's making: blocks in the shifted convention, with a
Markov head that links a block's tokens and a head that says how sure it is.

Backbones of Qwen 3 and Gemma 4. DeepSpec's files carry frozen copies of the target's embedding and
head; where they are that, they are dropped and the target's used.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import OpenError
from pipeline.types import DraftRows, Target
from stages.drafters.dflash import block_plan, flat, tap_ids
from stages.drafters.neural.blockwise import BlockModel, BlockRows
from stages.drafters.neural.checkpoint import read


class DSpark:
    """`path`: the drafter's folder. `threshold` in 0..1: drafts from the first one on that the
    confidence head gives less are dropped; 0 keeps the whole block."""

    can: frozenset[str] = frozenset()
    needs: Mapping[str, frozenset[str]] = {"model": frozenset({"taps"})}
    prefill = "tail"

    def __init__(self, target: Target, *, path: str, threshold: float = 0.0):
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: wants 0..1, got {threshold}")
        self._target, self.path, self.threshold = target, path, threshold
        self.namespace = f"dspark:{path}"
        self.taps: tuple[int, ...] = ()
        self.weight_bytes, self.bytes_per_token = 0, 0.0
        self.model: BlockModel | None = None

    def open(self) -> None:
        found = flat(read(self.path))
        if found.value("target_layer_ids") is None:
            raise OpenError(f"{self.path} names no target_layer_ids: {found.seen()}")
        taps = tap_ids(found, self._target.layer_count)
        self.model = BlockModel(found, block_plan(found, taps, shifted=True), self._target)
        head = self.model.markov
        if self.threshold and not (head is not None and head.has_confidence):
            raise OpenError(
                f"drafter.threshold={self.threshold} wants a confidence head, and {self.path} has "
                "none. Set drafter.threshold=0."
            )
        self.taps, self.namespace = taps, f"dspark:{found.identity()}"
        self.weight_bytes = self.model.weight_bytes
        self.bytes_per_token = self.model.bytes_per_token

    def close(self) -> None:
        self.model = None

    def rows(self, target: Target, max_width: int) -> DraftRows:
        assert self.model is not None, "the drafter is not open"
        return BlockRows(self.model, self.namespace, max_width, self.threshold)
