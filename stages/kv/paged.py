"""Keys and values in blocks of tokens that rows and saved states with a common prefix share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from pipeline.errors import at_least
from pipeline.types import Rows, Target
from stages.kv.native import Native, refuse_unknown
from stages.rows.attention import AttentionLayout
from stages.rows.blocks import Pool
from stages.rows.paged import PAGED, paged_rows


class Paged:
    """One pool of blocks a model and window, for all rows and saved states there are.

    Full and sliding attention layers are paged, others are kept as they are. `block_tokens`: what a
    block holds. A row wastes half a block on average; smaller blocks are slower to read.
    """

    can = frozenset({"rewind", "batch", "snapshot", "speculate"})

    def __init__(self, *, block_tokens: int = 32):
        self.block_tokens = at_least("block_tokens", block_tokens, 1)
        self.identity: Mapping[str, Any] = {"kv": "paged"}
        self._pools: weakref.WeakKeyDictionary[Target, dict[int, Pool]]
        self._pools = weakref.WeakKeyDictionary()

    def open(self) -> None: ...

    def close(self) -> None:
        self._pools.clear()

    def rows(self, target: Target, max_width: int) -> Rows:
        refuse_unknown(target)
        return paged_rows(target.specs, max_width, self.pools(target), AttentionLayout)

    def pools(self, target: Target) -> dict[int, Pool]:
        """By window; full layers have window 0."""
        windows = {spec.window for spec in target.specs if spec.kind in PAGED}
        made = {window: Pool(self.block_tokens) for window in windows}
        return self._pools.setdefault(target, made)

    def bytes_per_token(self, target: Target) -> float:
        return Native().bytes_per_token(target)
