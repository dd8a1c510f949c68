"""What all layers share during one forward: where each row's inputs go, and the masks.

Legend: B rows, W width of the forward, T keys fetched, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np


class Frame:
    """One forward of `width` columns over rows that hold `lengths` tokens each."""

    def __init__(self, lengths: Seq[int], width: int):
        self.lengths = tuple(lengths)
        self.width = width
        self._offset: int | mx.array | None = None
        self._slots: dict[tuple[int, ...], mx.array] = {}
        self._masks: dict[tuple[object, ...], mx.array] = {}

    @property
    def offset(self) -> int | mx.array:
        """Position of each row's first input: an int where all agree (cheaper), else int32 (B,)."""
        if self._offset is None:
            same = len(set(self.lengths)) <= 1
            self._offset = (self.lengths or (0,))[0] if same else mx.array(self.lengths, mx.int32)
        return self._offset

    def slots(self, starts: tuple[int, ...]) -> mx.array:
        """Buffer slots (B, 1, W, 1) the inputs are written to, for layers whose slot 0 holds
        position `starts[b]`."""
        if starts not in self._slots:
            first = np.subtract(self.lengths, starts)[:, None] + np.arange(self.width)
            self._slots[starts] = mx.array(first.astype(np.int32)[:, None, :, None])
        return self._slots[starts]

    def mask(self, starts: tuple[int, ...], low: int, stop: int, window: int) -> mx.array:
        """True (B, 1, W, stop - low) where a query may attend a key, by true positions: slot t of
        row b holds position starts[b] + t; a query sees itself and, with a window, window - 1 before."""
        key = (starts, low, stop, window)
        if key not in self._masks:
            query = np.array(self.lengths)[:, None, None] + np.arange(self.width)[None, :, None]
            held = np.array(starts)[:, None, None] + np.arange(low, stop)[None, None, :]
            seen = held <= query
            if window:
                seen &= held > query - window
            self._masks[key] = mx.array(seen[:, None])
        return self._masks[key]
