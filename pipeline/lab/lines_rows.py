"""Rows of one batch: of unequal length, many of them, and what requests do to each other."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pipeline.lab import texts
from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.lines_engine import python
from pipeline.lab.lines_rivals import compare, together
from pipeline.lab.sse import Reply

LENGTHS = (20, 60, 120, 180, 260, 360, 480, 640)  # prompt tokens of eight rows
ROW_TOKENS = 40
STALLS = 5  # the fewest with an interval: a repeat prefills 4,096 tokens


def unequal(bench: Bench) -> list[Figure]:
    """Tokens a second of eight streams together, while all eight are under way. The first, unmeasured
    time fills both servers' prefix caches, so that all start at once."""
    counter = bench.field.take("ours")[0]
    prompts = [texts.cut(texts.prose(3000 + n), n, counter.count) for n in LENGTHS]
    pool = ThreadPoolExecutor(len(prompts))

    def measure(one: Contestant, index: int) -> tuple[float, Sequence[Reply]]:
        ask = partial(one.complete, max_tokens=ROW_TOKENS)
        replies = list(pool.map(ask, prompts))
        return together(replies), replies

    def known(one: Contestant) -> None:
        for prompt in prompts:
            one.complete(prompt, max_tokens=1)

    with pool:
        title, promises = (
            "eight rows of unequal length, tokens/s of all",
            {"same": Promise(">=", 1.0)},
        )
        return compare(bench, "unequal", title, promises, measure, known)


def _turns(bench: Bench, what: str, recipe: str, repeats: int) -> list[dict[str, Any]]:
    options = ("--recipe", recipe, "--repeats", str(repeats))
    found: list[dict[str, Any]] = json.loads(
        python(bench, "-m", "pipeline.lab.turns", what, *options)
    )
    return found


def stall(bench: Bench) -> list[Figure]:
    """A chunk is what a step takes of a prompt while rows decode: `scheduler.step_tokens`, less the
    rows' own tokens. It takes longer the more of the prompt is in, so its time is that of the same
    prompt's longest one."""
    seen = _turns(bench, "stall", "smollm2", min(bench.pairs, STALLS))
    pairs = [(one["gap"], max(one["chunks"])) for one in seen]
    low, high = min(seen[0]["chunks"]), max(seen[0]["chunks"])
    note = f"{len(seen[0]['chunks'])} chunks of {low:.2f} to {high:.2f} s"
    title = "longest gap of a decoding row in a 4k prefill, chunk times"
    return [ratio("stall", title, pairs, Promise("<=", 1.5), note=note)]


def linear(bench: Bench) -> list[Figure]:
    """What a further row costs between 16 and 32 rows, over what it costs between 8 and 16: 1 where
    the cost is linear, 2 where it is quadratic; each time of rounds right after each other, since the
    machine may be quicker at another. Below 8 rows a pass waits for the weights, whoever
    shares it, so a further row is cheaper there than its own arithmetic."""
    seen = _turns(bench, "rows", "smollm2", bench.pairs)
    pairs = [((one["32"] - one["16"]) / 16, max((one["16"] - one["8"]) / 8, 1e-9)) for one in seen]
    usual = {rows: statistics.median(one[rows] for one in seen) * 1e3 for rows in seen[0]}
    note = "ms a round at " + ", ".join(f"{rows}: {ms:.0f}" for rows, ms in usual.items())
    title = "SmolLM2, cost of a row from 16 to 32, against 8 to 16"
    return [ratio("many", title, pairs, Promise("<=", 1.3), note=note)]


def finished(bench: Bench) -> list[Figure]:
    """Cost of a round when 500 more requests have come and gone, on the model without weights."""
    seen = _turns(bench, "finished", "fake", bench.pairs)
    pairs = [(one["after"], one["before"]) for one in seen]
    note = f"{statistics.median(after for after, _ in pairs) * 1e3:.2f} ms"
    title = "a round after 500 finished requests, against before"
    return [ratio("finished", title, pairs, Promise("<=", 1.05), note=note)]


LINES = (
    Line(("finished",), finished),
    Line(("many",), linear),
    Line(("stall",), stall),
    Line(("unequal/same",), unequal, rivals=True, most=FEW),
)
