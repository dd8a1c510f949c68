"""What the engine itself costs: on the model without weights, and before any model is read."""

from __future__ import annotations

import json
import time

from pipeline.lab.children import output
from pipeline.lab.contestants import environment
from pipeline.lab.figures import Figure, Promise
from pipeline.lab.lines import Bench, Line

ROWS = (1, 2, 4, 8, 16, 32, 64)
HEAVY = ("transformers", "mlx_lm", "torch")
LISTING = """
import sys
from pipeline.cli import main
code = main(["check", "smollm2"])
print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}))
sys.exit(code)
"""
FIRST, LAST = 200, 2000  # requests


def python(bench: Bench, *arguments: str) -> str:
    """Standard output of a Python process. BenchError with what it said if it fails."""
    return output(arguments, environment(bench.threads))


def overhead(bench: Bench) -> list[Figure]:
    """Seconds of a whole round of a model that computes nothing, its own table look-up included."""
    options = ("--repeats", str(bench.pairs), "--rows", *map(str, ROWS))
    best: dict[str, float] = json.loads(python(bench, "-m", "pipeline.lab.worker", *options))
    ms = {int(rows): seconds * 1e3 for rows, seconds in best.items()}
    note = "ms a round at " + ", ".join(f"{rows}: {value:.2f}" for rows, value in ms.items())
    one = Figure("overhead", "engine, one row, a round", ms[1], Promise("<=", 0.3), "ms", note=note)
    return [one, _linear(ms)]


def _linear(ms: dict[int, float]) -> Figure:
    """What a further row costs between 8 and 64 rows, over what it costs between 1 and 8. Linear is
    1; what grows with the square of the rows is 8."""
    low, high = (ms[8] - ms[1]) / 7, (ms[64] - ms[8]) / 56
    title = "engine, cost of a row from 8 to 64, against 1 to 8"
    note = f"{low * 1e3:.0f} and {high * 1e3:.0f} µs a row"
    return Figure("linear", title, high / max(low, 1e-9), Promise("<=", 1.3), note=note)


def check(bench: Bench) -> list[Figure]:
    """The whole process, Python's start included."""
    seconds = []
    for _ in range(bench.pairs):
        start = time.perf_counter()
        python(bench, "-m", "pipeline", "check", "smollm2")
        seconds.append(time.perf_counter() - start)
    loaded = python(bench, "-c", LISTING).rpartition("LOADED")[2].split()
    heavy = sorted(set(loaded) & set(HEAVY))
    note = f"imports {', '.join(heavy)}" if heavy else "imports neither transformers nor mlx-lm"
    title = "headrace check smollm2, whole process"
    best = Figure(
        "check", title, min(seconds), Promise("<=", 0.5), "s", None, seconds, note, not heavy
    )
    return [best]


def memory(bench: Bench) -> list[Figure]:
    """Resident memory of the server over HTTP, no two prompts alike."""
    (one,) = bench.field.take("fake")
    rss: dict[int, int] = {}
    for index in range(1, LAST + 1):
        one.complete(f"Request {index * 7919 % 10007} of many", max_tokens=16)
        if index in (FIRST, LAST):
            rss[index] = one.rss_bytes()
            bench.say(f"memory: {index} requests, {rss[index] / 1e6:.1f} MB")
    change = abs(rss[LAST] / rss[FIRST] - 1) * 100
    note = f"{rss[FIRST] / 1e6:.1f} to {rss[LAST] / 1e6:.1f} MB"
    title = "memory, from request 200 to 2,000 on fake, change"
    return [Figure("memory", title, change, Promise("<=", 2), "%", note=note)]


LINES = (
    Line(("check",), check),
    Line(("overhead", "linear"), overhead),
    Line(("memory",), memory, last=("fake",)),
)
