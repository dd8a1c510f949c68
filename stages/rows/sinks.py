"""Rows of one sliding layer that never forgets its first tokens (mlx-lm's `RotatingKVCache` with
`keep`; "attention sinks": Xiao et al., 2023, arXiv:2309.17453).

A query sees the `keep` first positions, and of the others itself and `window` - 1 before it. The
first `keep` slots of a buffer are theirs for good; the others slide. What is kept is no contiguous
range of tokens, so a saved state of such a layer is that of one length, as a recurrent layer's is.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.types import LayerSpec
from stages.rows.attention import AttentionLayout


class SinkLayout(AttentionLayout):
    """Slot t of row b holds position t where t < keep, else `starts[b]` + t."""

    def __init__(self, spec: LayerSpec, max_width: int):
        super().__init__(spec, max_width)
        self.keep = spec.keep
        self.must_hold += spec.keep

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        _, stop = self._span()
        key = ("sinks", tuple(self.starts), stop, self.window, self.keep)
        return self._frame.once(key, lambda: self._mask(stop))

    def _mask(self, stop: int) -> mx.array:
        """True (B, 1, W, stop)."""
        query_BW1 = (
            np.array(self._frame.lengths)[:, None, None] + np.arange(self._frame.width)[:, None]
        )
        slots = np.arange(stop)
        held_B1T = np.where(slots < self.keep, slots, np.array(self.starts)[:, None, None] + slots)
        near = (held_B1T > query_BW1 - self.window) | (held_B1T < self.keep)
        return mx.array(((held_B1T <= query_BW1) & near)[:, None])

    # --- rounds

    def kept(self, keep: Seq[int]) -> None:
        """Nothing: the rows' lengths say what is held."""

    # --- saved state

    def build(self, rows: Seq[Mapping[str, Any] | None], firsts: Seq[int], size: int) -> Any:
        """`firsts[i]`: first position that a query after the payload needs beside the kept ones."""
        return super().build(rows, [max(0, first - self.keep) for first in firsts], size)

    def payload(self, row: int, length: int) -> dict[str, mx.array]:
        """The kept slots and those that the next query needs, as copies. Lazy."""
        assert self.buffers is not None
        start = self.starts[row]
        first = max(self.keep, length - self.window + 1) - start
        spans = [slice(0, min(self.keep, length)), slice(first, length - start)]
        return {
            name: mx.concatenate([buffer[row][:, span] for span in spans], axis=1)
            for name, buffer in zip(("keys", "values"), self.buffers, strict=True)
        }

    # --- inside

    def _span(self) -> tuple[int, int]:
        return 0, super()._span()[1]

    def _shifted(self, shift: Seq[int], slots: int) -> np.ndarray:
        """Which slot (B, slots) comes to lie in each."""
        return np.where(np.arange(slots) < self.keep, 0, np.array(shift)[:, None]) + np.arange(
            slots
        )
