"""Scores of one forward, read back to the host once for all rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


class Scores:
    """logits_BWV of a forward; lazy on the device until somebody asks for the host's view."""

    def __init__(self, logits_BWV: mx.array):
        self.device = logits_BWV.astype(mx.float32)
        self._host: np.ndarray | None = None

    def host(self) -> np.ndarray:
        """The same as float32 (B, W, V), read-only by agreement; waits for the forward."""
        if self._host is None:
            self._host = np.asarray(self.device)
        return self._host


class WindowScores:
    """One row's columns of `Scores`; `numpy.asarray` makes logits_LV of it."""

    def __init__(self, scores: Scores, row: int, columns: slice):
        self.scores, self.row, self.columns = scores, row, columns

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        window_LV = self.scores.host()[self.row, self.columns]
        return window_LV if dtype is None else window_LV.astype(dtype, copy=bool(copy))
