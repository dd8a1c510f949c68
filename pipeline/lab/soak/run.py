"""One soak: the right answers first, then all clients at once, then what is left."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise
from pipeline.lab.metrics import percentile
from pipeline.lab.soak.client import PATIENCE_S
from pipeline.lab.soak.clients import Client, Seen, alone
from pipeline.lab.soak.health import Prober
from pipeline.lab.soak.questions import questions
from pipeline.lab.sse import get

PARTS = (0.4, 0.2, 0.2, 0.2)  # of the time, a rest after each; in the first one memory may grow
TICK_S = 0.2
REST_S = 7.0  # longer than stage.release.idle_s
FAULTS = {
    "different": "answers unlike the one asked alone",
    "our_fault": "replies of 500 and more",
    "unanswered": "requests without a proper end",
    "taken": "unfit bodies that got a 200",
}


@dataclass
class Soaked:
    """What was seen."""

    seen: Seen
    took: list[list[float]]  # of /health: monotonic seconds, seconds
    rests: list[int]  # resident bytes whenever nobody asked
    left: dict[str, int]  # rows that should be gone
    refused: list[str]  # questions that the recipe does not take

    def figures(self) -> list[Figure]:
        counts, none = self.seen.counts, Promise("<=", 0)
        said = f"{counts['requests']} requests, {counts['answers']} answers compared, {counts['left']} left"
        found = [
            Figure("answers", "answers compared", counts["answers"], Promise(">=", 1), note=said)
        ]
        found += [Figure(name, title, counts[name], none) for name, title in FAULTS.items()]
        rows = ", ".join(f"{count} {name}" for name, count in self.left.items())
        found.append(
            Figure("rows", "rows left at the end", sum(self.left.values()), none, note=rows)
        )
        return [*found, self._growth(), self._health()]

    def _growth(self) -> Figure:
        """At rest, when only what is kept is there: the last time against the first."""
        growth = (self.rests[-1] / self.rests[0] - 1) * 100
        note = ", ".join(f"{held / 1e6:.0f}" for held in self.rests) + " MB"
        title = "resident memory at rest, growth"
        return Figure("memory", title, growth, Promise("<=", 3), "%", note=note)

    def _health(self) -> Figure:
        spans = self.seen.prefills
        during = [s for at, s in self.took if any(a <= at <= b for a, b in spans)]
        p99 = (percentile(during, 0.99) or 0.0) * 1e3
        every = (percentile([s for _, s in self.took], 0.99) or 0.0) * 1e3
        note = f"{len(during)} of {len(self.took)}; of all {every:.1f} ms"
        title = "/health while long prompts come in, p99"
        return Figure("health", title, p99, Promise("<=", 100), "ms", note=note)


def soak(
    one: Contestant, seconds: float, clients: int, seed: int, say: Callable[[str], None]
) -> Soaked:
    """`one` is loaded and idle. BenchError, OSError if it cannot even be asked alone."""
    asked, seen = questions(), Seen()
    right, refused = alone(one.port, asked)
    say(f"{len(right)} questions asked alone; {clients} clients for {seconds:.0f} s")
    prober = Prober(one.port)
    gate, stop = threading.Event(), threading.Event()
    crowd = [Client(one.port, right, asked, seen, seed + n) for n in range(clients)]
    threads = [threading.Thread(target=client.run, args=(gate, stop)) for client in crowd]
    for thread in threads:
        thread.start()
    rests = []
    for part in PARTS:
        gate.set()
        _pass(seconds * part)
        gate.clear()
        left = _left(one.port)
        rests.append(one.rss_bytes())
        say(f"at rest: {rests[-1] / 1e6:.0f} MB, {dict(seen.counts)}")
    stop.set()
    gate.set()
    for thread in threads:
        thread.join()
    return Soaked(seen, prober.stop(), rests, left, refused)


def _pass(seconds: float) -> None:
    """So many seconds in which this process was not stopped with all the others."""
    for _ in range(round(seconds / TICK_S)):
        time.sleep(TICK_S)


def _left(port: int) -> dict[str, int]:
    """Rows and requests that are still there when they have had their time to go."""
    until = time.monotonic() + PATIENCE_S
    last = time.monotonic()  # that there was somebody
    while (now := time.monotonic()) < min(until, last + REST_S):
        rows = json.loads(get(port, "/stats", PATIENCE_S))["rows"]
        left = {name: rows[name] for name in ("active", "prefilling", "waiting", "open_requests")}
        last = now if any(left.values()) else last
        time.sleep(TICK_S)
    return left


def report(soaked: Soaked, figures: Sequence[Figure]) -> dict[str, Any]:
    """All of it, for a machine."""
    return {
        "figures": [
            {"name": f.name, "value": f.value, "met": f.met, "note": f.note} for f in figures
        ],
        "counts": dict(soaked.seen.counts),
        "faults": soaked.seen.faults,
        "refused": soaked.refused,
        "rests": soaked.rests,
    }
