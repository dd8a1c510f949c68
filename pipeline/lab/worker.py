"""Times rounds of the engine without a model, in a process of its own.

    python -m pipeline.lab.worker --rows 1 8 64 --repeats 20

Prints one JSON object: rows -> seconds of a round, the best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections.abc import Sequence
from typing import Any

TOKENS = 96


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.lab.worker")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    print(json.dumps(best_rounds(args.rows, args.repeats)))
    return 0


def best_rounds(rows: Sequence[int], repeats: int) -> dict[int, float]:
    import pipeline

    settings = ("drafter=none", "tier=none", f"limits.max_rows={max(rows)}")
    with pipeline.load("fake", *settings) as engine:
        round_seconds(engine, 1)
        turns = [{count: round_seconds(engine, count) for count in rows} for _ in range(repeats)]
    return {count: min(turn[count] for turn in turns) for count in rows}


class Stamps:
    """Takes one row's events and notes when its tokens came."""

    def __init__(self, ended: queue.SimpleQueue[Any]):
        self.times: list[float] = []
        self._ended = ended

    def __call__(self, event: Any) -> None:
        from pipeline.types import Delta, Done, Failed

        if isinstance(event, Delta):
            self.times.append(time.perf_counter())
        elif isinstance(event, Done | Failed):
            self._ended.put(event)


def round_seconds(engine: Any, rows: int, tokens: int = TOKENS) -> float:
    """Seconds a round while all rows are under way."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stamps = [Stamps(ended) for _ in range(rows)]
    for index, stamp in enumerate(stamps):
        request = engine.request(
            f"Row {index}", max_tokens=tokens + rows, temperature=0.0, ignore_eos=True
        )
        engine.submit(request, stamp)
    for _ in stamps:
        if (event := ended.get()).__class__.__name__ == "Failed":
            raise event.error
    seconds = window(stamps)
    # on a busy machine the first row may end before the last begins
    return round_seconds(engine, rows, 4 * tokens) if seconds is None else seconds


def window(stamps: Sequence[Stamps]) -> float | None:
    """From the last row's first token to the first row's last: mean seconds between its tokens. None
    where that is no time at all."""
    start = max(stamp.times[0] for stamp in stamps)
    stop = min(stamp.times[-1] for stamp in stamps)
    seen = [time for time in stamps[-1].times if start <= time <= stop]
    return (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else None


if __name__ == "__main__":
    raise SystemExit(main())
