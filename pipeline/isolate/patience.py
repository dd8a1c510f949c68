"""How often, and how soon, a process that has ended is started again, and how long one may be silent."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeline.server.settings import ServerSettings

HEALTHY_S = 60.0  # who has served so long has forgotten earlier ends
FIRST_S, LONGEST_S = 0.5, 30.0
START_S = 300.0  # a start may be silent so long: before its first beat it reads much from a disk


@dataclass
class Patience:
    """At once the first time, then after FIRST_S, each time twice as long; `restarts` times in a row."""

    restarts: int = 5
    hang_s: float = 300.0
    ended: int = 0  # in a row
    start_s: float = 1.0  # how long the last start took
    _begun: float = 0.0
    _opened: float | None = None

    def told(self, settings: ServerSettings) -> None:
        """What was chosen, known once the first process has opened."""
        self.restarts, self.hang_s = settings.restarts, settings.hang_s

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

    def silence_s(self, up: bool) -> float:
        """How long it may give no sign of life; `up`: it has opened."""
        return self.hang_s if up else max(START_S, self.hang_s)

    @property
    def expected_s(self) -> float:
        """From an end until requests are taken again."""
        return self._pause() + self.start_s

    def _pause(self) -> float:
        return 0.0 if self.ended <= 1 else min(LONGEST_S, FIRST_S * 2 ** (self.ended - 2))
