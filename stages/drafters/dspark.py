"""DSpark drafters, and DFlash ones of DeepSpec's making: blocks in the shifted convention, with a
Markov head that links a block's tokens and a head that says how sure it is.

Backbones of Qwen 3 and Gemma 4. DeepSpec's files carry frozen copies of the target's embedding and
head; where they are that, they are dropped and the target's used.
"""

from __future__ import annotations

from pipeline.errors import OpenError
from pipeline.types import DraftRows, Target
from stages.drafters.dflash import block_plan, flat, tap_ids
from stages.drafters.neural.blockwise import BlockModel, BlockRows
from stages.drafters.neural.checkpoint import read
from stages.drafters.neural.drafter import NeuralDrafter


class DSpark(NeuralDrafter[BlockModel]):
    """`path`: the drafter's folder. `threshold` in 0..1: drafts from the first one on that the
    confidence head gives less are dropped; 0 keeps the whole block."""

    family = "dspark"

    def __init__(self, target: Target, *, path: str, threshold: float = 0.0):
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: wants 0..1, got {threshold}")
        super().__init__(target, path)
        self.threshold = threshold

    def load(self) -> tuple[BlockModel, str]:
        found = flat(read(self.folder))
        if found.value("target_layer_ids") is None:
            raise OpenError(f"{self.path} names no target_layer_ids: {found.seen()}")
        plan = block_plan(found, tap_ids(found, self._target.layer_count), shifted=True)
        model = BlockModel(found, plan, self._target)
        if self.threshold and not (model.markov is not None and model.markov.has_confidence):
            raise OpenError(
                f"drafter.threshold={self.threshold} wants a confidence head, and {self.path} has "
                "none. Set drafter.threshold=0."
            )
        return model, found.identity()

    def rows_of(self, model: BlockModel, max_width: int) -> DraftRows:
        return BlockRows(model, self.namespace, max_width, self.threshold)
