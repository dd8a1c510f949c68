"""Keys and values in blocks of tokens that rows and saved states with a common prefix share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal

from pipeline.errors import outside, refuse
from pipeline.types import LayerSpec, Rows, Target
from stages.kv.affine import Affine
from stages.kv.coded import coded_layout
from stages.kv.native import Native, refuse_unknown
from stages.kv.scheme import Scheme
from stages.kv.shapes import KEPT, coverage
from stages.rows.attention import AttentionLayout
from stages.rows.blocks import Pool
from stages.rows.paged import paged_rows

MOST_TOKENS = (
    1024  # a block; a pool begins with two in every layer, and each row wastes half of one
)


class Paged:
    """One pool of blocks a model and window, for all rows and saved states there are.

    Full and sliding attention layers are paged, others are kept as they are. `block_tokens`: what a
    block holds; a row's last block is half empty on average, smaller blocks are slower to read.
    `codec`: native stores numbers as the model computes them, affine in `bits` with a scale and a
    bias for `group_size` of them, as `Affine` does.
    """

    can = frozenset({"rewind", "batch", "snapshot", "speculate"})

    def __init__(
        self,
        *,
        codec: Literal["native", "affine"] = "native",
        bits: int = 8,
        group_size: int = 64,
        block_tokens: int = 32,
    ):
        refuse(
            codec="" if codec in ("native", "affine") else f"wants native or affine, got {codec!r}",
            block_tokens=outside(block_tokens, 1, MOST_TOKENS),
        )
        self.block_tokens = block_tokens
        self.stored = Affine(bits=bits, group_size=group_size) if codec == "affine" else Native()
        coding = {k: v for k, v in self.stored.identity.items() if k != "kv"}
        self.identity: Mapping[str, Any] = {"kv": "paged", "codec": codec, **coding}
        self._pools: weakref.WeakKeyDictionary[Target, dict[int, Pool]]
        self._pools = weakref.WeakKeyDictionary()

    def open(self) -> None:
        self.stored.open()

    def close(self) -> None:
        self.stored.close()
        self._pools.clear()

    def rows(self, target: Target, max_width: int) -> Rows:
        refuse_unknown(target)
        coder: Callable[[LayerSpec, int], AttentionLayout] = AttentionLayout
        if isinstance(self.stored, Affine):
            self.stored.refuse(target)
            pair = (self.stored.scheme,) * 2
            coder = partial(coded_layout, pair=pair, codec=cache(Scheme.codec))
        return paged_rows(target.specs, max_width, self.pools(target), coder)

    def pools(self, target: Target) -> dict[int, Pool]:
        """By window; full layers have window 0."""
        if target not in self._pools:
            windows = {spec.window for spec in target.specs if spec.codable}
            self._pools[target] = {window: Pool(self.block_tokens) for window in windows}
        return self._pools[target]

    def bytes_per_token(self, target: Target) -> float:
        """Of a token that nobody shares, in a full block."""
        return self.stored.bytes_per_token(target)

    def coverage(self, target: Target) -> Mapping[str, Any]:
        paged = [i for i, spec in enumerate(target.specs) if spec.codable]
        why = {kind: reason.replace("not coded", "not paged") for kind, reason in KEPT.items()}
        return coverage(target, paged, self.bytes_per_token(target), why)
