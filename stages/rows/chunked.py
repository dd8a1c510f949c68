"""Rows of one layer of chunked attention (llama4): a query sees what is before it in its own chunk of
`window` positions, counted from the start of the text.

A chunk lies within a window of its size, so slots, sliding and saved state are those of a sliding
window; only the mask is another one.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from stages.rows.attention import AttentionLayout


class ChunkedLayout(AttentionLayout):
    """Wants a model that asks for its masks (`stages.models.loading.fronts`)."""

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        low, stop = self._span()
        starts = tuple(self.starts)
        key = ("chunked", starts, low, stop, self.window)
        return self._frame.once(key, lambda: self._mask(low, stop))

    def maybe_trim_front(self) -> None:
        """Nothing: rounds slide by themselves."""

    def _mask(self, low: int, stop: int) -> mx.array:
        """True (B, 1, W, stop - low)."""
        query_BW1 = (
            np.array(self._frame.lengths)[:, None, None] + np.arange(self._frame.width)[:, None]
        )
        held_B1T = np.array(self.starts)[:, None, None] + np.arange(low, stop)
        same_chunk = held_B1T // self.window == query_BW1 // self.window
        return mx.array(((held_B1T <= query_BW1) & same_chunk)[:, None])
