"""Times turns of the scheduler in a process of its own: what requests do to each other.

    python -m pipeline.lab.turns stall|rows|finished --recipe NAME --repeats N

Prints one JSON list, an entry a repeat.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeline.lab.worker import Stamps, round_seconds

LONG_TOKENS = 4096
ROWS = (8, 16, 32)
FINISHED = 500  # requests
FEW, MANY = 5, 480  # times that many rounds are measured
TOKENS = 24


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.lab.turns")
    parser.add_argument("what", choices=sorted(MEASURES))
    parser.add_argument("--recipe", default="fake")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    import pipeline

    settings = ("drafter=none", "tier=none", f"limits.max_rows={max(ROWS)}")
    found = []
    for _ in range(args.repeats):  # an engine each: none has seen the requests of those before it
        with pipeline.load(args.recipe, *settings) as engine:
            found.append(MEASURES[args.what](engine))
    print(json.dumps(found))
    return 0


def stall(engine: Any) -> Mapping[str, Any]:
    """One row decodes while a long prompt comes in: seconds between its tokens, and of the chunks."""
    chunks: list[float] = []
    stage = engine.pipeline.stages["chunked_prefill"]
    stage.run = _timed(type(stage).run, stage, chunks)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    row, long = Stamps(queue.SimpleQueue()), Stamps(ended)
    ticket = engine.submit(engine.request("A row", max_tokens=2000, ignore_eos=True), row)
    while len(row.times) < 4:
        time.sleep(0.01)
    chunks.clear()
    ids = [33 + index * 7919 % 90 for index in range(LONG_TOKENS)]
    start = time.perf_counter()
    engine.submit(engine.request(ids, max_tokens=1), long)
    ended.get()
    stop = time.perf_counter()
    ticket.cancel()
    del stage.run
    times = [at for at in row.times if start <= at <= stop]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {"gap": max(gaps), "chunks": chunks, "gaps": gaps}


def _timed(run: Callable[..., None], stage: Any, seconds: list[float]) -> Callable[[Any], None]:
    def timed(batch: Any) -> None:
        start = time.perf_counter()
        run(stage, batch)
        seconds.append(time.perf_counter() - start)

    return timed


def rows(engine: Any) -> Mapping[str, float]:
    """Seconds of a round by rows."""
    return {str(count): round_seconds(engine, count, TOKENS) for count in ROWS}


def finished(engine: Any) -> Mapping[str, float]:
    """Seconds of a round before and after many requests have come and gone: the mean of many rounds, so
    that what costs in some of them shows, and the best of a few such means, since what disturbs a fifth
    of a millisecond only adds to it."""

    def undisturbed() -> float:
        return min(round_seconds(engine, 4, MANY) for _ in range(FEW))

    round_seconds(engine, 4)  # warms up
    before = undisturbed()
    for index in range(FINISHED):
        engine.generate(f"Request {index}", max_tokens=2, ignore_eos=True)
    return {"before": before, "after": undisturbed()}


MEASURES: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "stall": stall,
    "rows": rows,
    "finished": finished,
}


if __name__ == "__main__":
    raise SystemExit(main())
