"""Signs of life: a process that lives and does nothing is to be told from one that has long work to do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline.engine import Engine
from pipeline.isolate.wire import Beat, Line

BEAT_S = 1.0


class Pulse(threading.Thread):
    """The engine's side: a beat a second while it opens, later as long as its thread gets on or has nothing to
    do. One that is stopped, or stuck in one step, falls silent."""

    def __init__(self, line: Line):
        super().__init__(name="headrace-pulse", daemon=True)
        self._line = line
        self.engine: Engine | None = None  # once it is open

    def run(self) -> None:
        seen, over = -1, threading.Event()
        while not over.wait(BEAT_S):
            engine = self.engine
            if engine is None or engine.waits or engine.rounds != seen:
                self._line.say(Beat())
            seen = -1 if engine is None else engine.rounds


class Silence(threading.Thread):
    """The other side: counts beats that have not come, and says so when it has been `most_s` of them. Its own
    waits are what is counted: when it has been stopped itself (a machine that slept), time alone says nothing."""

    def __init__(self, most_s: Callable[[], float], too_long: Callable[[float], None]):
        super().__init__(name="headrace-silence", daemon=True)
        self._most_s, self._too_long = most_s, too_long
        self._over = threading.Event()
        self.seconds = 0.0

    def beat(self) -> None:
        self.seconds = 0.0

    def end(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.wait(BEAT_S):
            self.seconds += BEAT_S
            if self.seconds >= self._most_s():
                self._too_long(self.seconds)
