"""What all layers share during one forward: where each row's inputs go, and the masks.

Legend: B rows, W width of the forward, T keys fetched, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

STEP = 256  # tokens a buffer grows by, and by which a sliding layer may exceed what it must hold


def capacity(tokens: int) -> int:
    """Slots of a buffer for this many tokens."""
    return -(-tokens // STEP) * STEP


class Frame:
    """One forward of `width` columns over rows that hold `lengths` tokens each; row b's real inputs
    are its first `widths[b]` columns (all, unless given)."""

    def __init__(self, lengths: Seq[int], width: int, widths: Seq[int] | None = None):
        self.lengths = tuple(lengths)
        self.width = width
        self.widths = tuple(widths) if widths is not None else (width,) * len(self.lengths)
        self._padded = any(w != width for w in self.widths)
        self._counts: mx.array | None = None
        self._real: mx.array | None = None
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

    @property
    def counts(self) -> mx.array | None:
        """Real inputs of each row, int32 (B,); None where no row is padded."""
        if self._padded and self._counts is None:
            self._counts = mx.array(self.widths, mx.int32)
        return self._counts

    @property
    def real(self) -> mx.array | None:
        """True (B, W) where a column is no padding; None where no row is padded."""
        if self._padded and self._real is None:
            columns = np.arange(self.width)[None, :] < np.array(self.widths)[:, None]
            self._real = mx.array(columns)
        return self._real

    def slots(self, starts: tuple[int, ...]) -> mx.array:
        """Buffer slots (B, 1, W, 1) the inputs are written to, for layers whose slot 0 holds
        position `starts[b]`."""
        if starts not in self._slots:
            first = np.subtract(self.lengths, starts)[:, None] + np.arange(self.width)
            self._slots[starts] = mx.array(first.astype(np.int32)[:, None, :, None])
        return self._slots[starts]

    def least_mask(
        self, starts: tuple[int, ...], low: int, stop: int, window: int, as_array: bool
    ) -> mx.array | str | None:
        """`mask`, or None or "causal" where they say the same."""
        aligned = len({n - s for n, s in zip(self.lengths, starts, strict=True)}) == 1
        inside = not window or stop - low <= window
        if aligned and inside and not as_array:
            return None if self.width == 1 else "causal"
        return self.mask(starts, low, stop, window)

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

    def once(self, key: tuple[object, ...], make: Callable[[], mx.array]) -> mx.array:
        """`make()`, kept for the other layers that want the same in this forward."""
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]
