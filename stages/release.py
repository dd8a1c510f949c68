"""Give back what was freed."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pipeline.types import Batch, Device, Target


class Release:
    """Once nothing has run for a while, memory that MLX and the allocator keep for the next arrays goes back
    to the system: long prompts leave twice a small model's weights there. While requests come one after the
    other it stays, for making it anew costs time."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    needs: Mapping[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(self, device: Device, target: Target, *, idle_s: float = 5.0):
        if idle_s < 0:
            raise ValueError(f"idle_s: wants >= 0 seconds, got {idle_s}")
        self._device, self._target, self._idle_s = device, target, idle_s
        self._calls, self._since = 0, 0.0
        self.again_s: float | None = None  # when the engine should call again; None: on news

    def run(self, batch: Batch) -> None:
        now = time.monotonic()
        if self._target.calls != self._calls:  # something has run since
            self._calls, self._since, self.again_s = self._target.calls, now, self._idle_s
        elif self.again_s is not None:
            self.again_s = max(0.0, self._since + self._idle_s - now)
            if not self.again_s:
                self._device.release()
                self.again_s = None
