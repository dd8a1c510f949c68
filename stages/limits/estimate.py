"""What rows may come to need, in bytes, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from pipeline.types import Adapters, Depth, Drafter, KVPolicy, LayerSpec, Target
from stages.rows.frame import STEP, capacity
from stages.rows.recurrent import slots
from stages.rows.state import is_exact

STATES = 3  # of a recurrent layer: held, that of the round's start, and that of a round ahead


class Estimate:
    """Bills weights and rows from the policy's own bytes a token, window by window.

    A window is billed with what it may hold beyond: `chunk` is the most that prefill feeds at once.
    Rows of one batch share buffers, so every row is billed the longest one's length, rounded up to
    what buffers grow by. More than one row is billed twice: while a row joins, the buffers it joins
    exist beside those it came from. What lies in blocks (a policy with `block_tokens`) has neither:
    rows are billed their own, shared ones by everybody who shares them. Nothing of a pass's
    intermediate values is in here.
    """

    def __init__(
        self,
        target: Target,
        kv: KVPolicy,
        depth: Depth,
        drafter: Drafter,
        draft_model: Target,
        adapters: Adapters,
        chunk: int,
    ) -> None:
        self.target, self.kv, self.depth, self.adapters = target, kv, depth, adapters
        self.drafter, self.draft_model = drafter, draft_model
        self.block = int(getattr(kv, "block_tokens", 0))
        self.chunk, self.start = chunk, int(getattr(kv, "start", 0))

    @property
    def slack(self) -> int:
        """Tokens that may be held beyond a window: a round or a chunk, what is let go only once it is so
        much, and what buffers are rounded up by."""
        return self.depth.max + 1 + self.chunk + 2 * STEP

    @property
    def early(self) -> int:
        """Tokens of a row that are kept twice, before a policy's `start`."""
        return capacity(self.start) + STEP + self.slack if self.start else 0

    @property
    def weights(self) -> int:
        """Bytes of the model's and the drafter's weights. Known once they are open."""
        return self.target.weight_bytes + self.drafter_weights

    @property
    def drafter_weights(self) -> int:
        own: int = getattr(self.drafter, "weight_bytes", 0)
        return self.draft_model.weight_bytes + own

    def row(self, tokens: int) -> int:
        """Bytes of one row that holds `tokens` tokens, windows capped, the drafter's included."""
        return self._blocks(tokens) + self._buffers(tokens)

    def _blocks(self, tokens: int) -> int:
        """Of the layers that lie in blocks."""
        if not self.block:
            return 0
        return self._layers(True, -(-tokens // self.block) * self.block)

    def _buffers(self, tokens: int) -> int:
        """Of all else: what is held by tokens, by state, and for the drafter."""
        whole = capacity(tokens)
        drafts = math.ceil(float(getattr(self.drafter, "bytes_per_token", 0.0)) * whole)
        fixed = sum(_fixed(spec, self.slack) for spec in self.target.specs)
        return drafts + fixed + self._layers(False, whole)

    def _layers(self, in_blocks: bool, whole: int) -> int:
        """Bytes of `whole` tokens in the layers that lie in blocks, or in the others."""
        held = 0.0
        for window in {spec.window for spec in self.target.specs}:
            most = window + self.slack if window else math.inf
            only = self._only(window, in_blocks)
            held += self.kv.bytes_per_token(only) * min(whole, most)
            held += self._early_bytes(only) * min(whole, most, self.early)
        return math.ceil(held)

    def rows(self, lengths: Seq[int]) -> int:
        """Bytes of rows of these lengths in one batch, at the worst moment."""
        copies = 2 if len(lengths) > 1 else 1
        buffers = copies * len(lengths) * self._buffers(max(lengths, default=0))
        return buffers + sum(map(self._blocks, lengths))

    def parked(self, lengths: Seq[int]) -> int:
        """Bytes of the states of parked rows of these lengths."""
        return sum(map(self.row, lengths))

    def of(self, lengths: Seq[int], kept: Seq[int]) -> dict[str, int]:
        """The bill of such rows and parked states by name, for people."""
        return {
            "weights_bytes": self.weights,
            "drafter_weights_bytes": self.drafter_weights,
            "adapters_bytes": self.adapters.nbytes,
            "rows_bytes": self.rows(lengths),
            "parked_bytes": self.parked(kept),
        }

    def _early_bytes(self, only: Any) -> float:
        """What a token takes besides, before a policy's `start`."""
        asked = getattr(self.kv, "early_bytes_per_token", None)
        return asked(only) if asked else 0.0

    def _only(self, window: int, in_blocks: bool) -> Any:
        """A model in which layers with another window, or that lie elsewhere, have no heads."""

        def wanted(spec: LayerSpec) -> bool:
            return spec.window == window and in_blocks == bool(self.block and spec.codable)

        specs = tuple(
            spec if is_exact(spec) or wanted(spec) else _headless(spec)
            for spec in self.target.specs
        )
        return _View(self.target, specs)


@dataclass(frozen=True, eq=False)
class _View:
    """A target that says other specs."""

    target: Target
    specs: tuple[LayerSpec, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def _headless(spec: LayerSpec) -> LayerSpec:
    dtype = spec.signature.rpartition(":")[2] or "float32"
    return replace(spec, signature=f"{spec.kind}:0x0:{dtype}")


def _fixed(spec: LayerSpec, slack: int) -> int:
    """Bytes a row takes in a layer whose state does not grow with its tokens; 0 for others."""
    if spec.kind == "recurrent":
        return STATES * sum(math.prod(shape) * dtype.size for shape, dtype in slots(spec))
    if spec.kind != "sinks":
        return 0
    heads, size = map(int, spec.signature.split(":")[1].split("+")[0].split("x"))
    item = 4 if spec.signature.endswith("float32") else 2
    return 2 * heads * size * item * (spec.keep + spec.window + slack)
