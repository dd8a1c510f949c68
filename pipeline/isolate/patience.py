"""How often, and how soon, a process that has ended is started again."""

from __future__ import annotations

import time
from dataclasses import dataclass

HEALTHY_S = 60.0  # who has served so long has forgotten earlier ends
LONGEST_S = 30.0


@dataclass
class Patience:
    """At once the first time, then after `first_s`, each time twice as long; `restarts` times in a row."""

    restarts: int = 5
    first_s: float = 0.5
    ended: int = 0  # in a row
    start_s: float = 1.0  # how long the last start took
    _begun: float = 0.0
    _opened: float | None = None

    def begin(self) -> None:
        self._begun, self._opened = time.monotonic(), None

    def opened(self) -> None:
        self._opened = time.monotonic()
        self.start_s = self._opened - self._begun

    def wait_s(self) -> float | None:
        """The process has ended: seconds until the next start; None: no more."""
        served_s = 0.0 if self._opened is None else time.monotonic() - self._opened
        self.ended = 1 if served_s >= HEALTHY_S else self.ended + 1
        return self._pause() if self.ended <= self.restarts else None

    @property
    def expected_s(self) -> float:
        """From an end until requests are taken again."""
        return self._pause() + self.start_s

    def _pause(self) -> float:
        return 0.0 if self.ended <= 1 else min(LONGEST_S, self.first_s * 2 ** (self.ended - 2))
