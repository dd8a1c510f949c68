"""What rows may come to need, in bytes, before anything is computed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Seq

from pipeline.types import Depth, Drafter, KVPolicy, LayerSpec, Target

STEP = 256  # tokens that rows' buffers grow by
SLACK = (
    1024  # tokens a sliding layer may hold beyond its window: a chunk, and what it drops at once
)


class Estimate:
    """Bills weights and rows from the policy's own bytes a token.

    Rows of one batch share buffers, so every row is billed the longest one's length, rounded up to
    what buffers grow by. More than one row is billed twice: while a row joins, the buffers it joins
    exist beside those it came from. Nothing of a pass's intermediate values is in here.
    """

    def __init__(
        self, target: Target, kv: KVPolicy, depth: Depth, drafter: Drafter, draft_model: Target
    ) -> None:
        self.target, self.kv, self.depth = target, kv, depth
        self.drafter, self.draft_model = drafter, draft_model

    @property
    def weights(self) -> int:
        """Bytes of the model's and the drafter's weights. Known once they are open."""
        own: int = getattr(self.drafter, "weight_bytes", 0)
        return self.target.weight_bytes + self.draft_model.weight_bytes + own

    def row(self, tokens: int) -> int:
        """Bytes of one row that holds `tokens` tokens, windows capped."""
        whole = -(-tokens // STEP) * STEP
        width = self.depth.max + 1
        sizes = [(_elements(spec), min(whole, _held(spec, width))) for spec in self.target.specs]
        total = sum(elements for elements, _ in sizes) or 1
        share = sum(elements * held for elements, held in sizes) / total
        drafting = float(getattr(self.drafter, "bytes_per_token", 0.0)) * whole
        return math.ceil(self.kv.bytes_per_token(self.target) * share + drafting)

    def rows(self, lengths: Seq[int]) -> int:
        """Bytes of rows of these lengths in one batch, at the worst moment."""
        copies = 2 if len(lengths) > 1 else 1
        return copies * len(lengths) * self.row(max(lengths, default=0))

    def parked(self, lengths: Seq[int]) -> int:
        """Bytes of the states of parked rows of these lengths."""
        return sum(map(self.row, lengths))

    def of(self, lengths: Seq[int], kept: Seq[int]) -> dict[str, int]:
        """The bill of such rows and parked states by name, for people."""
        return {
            "weights_bytes": self.weights,
            "rows_bytes": self.rows(lengths),
            "parked_bytes": self.parked(kept),
        }


def _held(spec: LayerSpec, width: int) -> float:
    """Most tokens a layer of this kind ever holds."""
    return spec.window + width + SLACK if spec.kind == "sliding" else math.inf


def _elements(spec: LayerSpec) -> int:
    """A layer's share in a token's bytes: heads x size where its signature says them."""
    shape = re.search(r"(\d+)x(\d+)", spec.signature)
    return int(shape[1]) * int(shape[2]) if shape else 1
