"""Drafters that look things up, and the depth that decides whether drafting pays."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pipeline.lab import texts
from pipeline.lab.children import output
from pipeline.lab.contestants import Contestant, environment
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.sse import BenchError, Reply

COPY_TOKENS, FREE_TOKENS, ROWS = 300, 96, 4
FIXED = ("suffix", "suffix8")  # depths that are tried for the best one
LOOKUP = """
import random, statistics, time
from stages.drafters.suffix import SuffixRow
draw = random.Random(0)
def words(count):
    return [min(49151, int(draw.paretovariate(0.8))) for _ in range(count)]
text = words(60000)  # then parts of itself between new words, as a long chat has
while len(text) < 100000:
    start = draw.randrange(len(text) - 300)
    text += text[start : start + draw.randrange(20, 300)] + words(draw.randrange(50, 200))
row = SuffixRow(3, 1.0)
row.extend(text[:100000])
best = []
for turn in range(5):
    more = text[7000 * turn : 7000 * turn + 1000] + words(1000)
    began = time.perf_counter()
    for token in more:
        row.propose(token, 16)
        row.extend([token])
    best.append((time.perf_counter() - began) / len(more))
print(min(best) * 1e6, row.tree.nbytes / len(row.tree.text))
"""


def lookup(bench: Bench) -> list[Figure]:
    """One proposal of up to 16 tokens and one token taken in, after 100,000 tokens of history."""
    told = output(["-c", LOOKUP], environment(bench.threads))
    micros, size = map(float, told.split())
    title = "drafter=suffix, a token at 100,000 tokens of history"
    note = f"{size:.0f} bytes a token"
    return [Figure("suffix/lookup", title, micros, Promise("<=", 20), "µs", note=note)]


def prompts(name: str, rows: int) -> list[str]:
    """As many prompts as rows that ask for the same kind of text and share no cached answer."""
    if name == "free":
        return [f"{line} " for line in texts.read("continue").splitlines()][:rows]
    text = texts.read(name)
    return [text.replace("mill ", f"mill{' of old' * row} ", 1) for row in range(rows)]


def answers(one: Contestant, name: str, rows: int) -> tuple[float, list[Reply]]:
    """Tokens a second of all rows together, prompts known already; the replies."""
    free: dict[str, Any] = {"max_tokens": FREE_TOKENS, "ignore_eos": True}
    ask = (
        partial(one.complete, **free)
        if name == "free"
        else partial(one.chat, max_tokens=COPY_TOKENS)
    )
    with ThreadPoolExecutor(rows) as pool:
        began = time.perf_counter()
        replies = list(pool.map(ask, prompts(name, rows)))
        return sum(reply.tokens for reply in replies) / (time.perf_counter() - began), replies


def measure(bench: Bench, names: tuple[str, ...], text: str, rows: int) -> list[list[float]]:
    """Rounds of rates, one a contestant. BenchError where a text differs."""

    def known(who: Contestant) -> None:
        answers(who, text, rows)  # prompts become known, costs are learned

    def one(who: Contestant, index: int) -> tuple[float, list[str]]:
        rate, replies = answers(who, text, rows)
        return rate, [reply.text for reply in replies]

    what = f"{'/'.join(names)} {text} {rows}"
    rounds = bench.compare(what, names, one, known)
    if any(said != results[0][1] for results in rounds for _, said in results):
        raise BenchError(f"{what}: texts differ")
    return [[rate for rate, _ in results] for results in rounds]


def suffix_clean(bench: Bench) -> list[Figure]:
    pairs = [(a, b) for a, b in measure(bench, ("suffix", "ours"), "copy_clean", 1)]
    title = "drafter=suffix against none, clean copy, depth 16"
    return [ratio("suffix/clean", title, pairs, Promise(">=", 2.5))]


def adaptive_free(bench: Bench, rows: int) -> list[Figure]:
    pairs = [(a, b) for a, b in measure(bench, ("adaptive", "ours"), "free", rows)]
    title = f"depth=adaptive against no drafter, free text, {rows} rows"
    return [ratio(f"adaptive/free{rows}", title, pairs, Promise(">=", 0.97))]


def adaptive_copy(bench: Bench, rows: int) -> list[Figure]:
    """Against whichever fixed depth was the fastest over all rounds."""
    rounds = measure(bench, ("adaptive", *FIXED), "copy_clean", rows)
    medians = [
        statistics.median(rates[1 + index] for rates in rounds) for index in range(len(FIXED))
    ]
    best = medians.index(max(medians))
    pairs = [(rates[0], rates[1 + best]) for rates in rounds]
    title = f"depth=adaptive against the best fixed depth, clean copy, {rows} rows"
    note = f"the best was {FIXED[best]}"
    return [ratio(f"adaptive/copy{rows}", title, pairs, Promise(">=", 0.95), note=note)]


LINES = (
    Line(("suffix/lookup",), lookup),
    Line(("suffix/clean",), suffix_clean, most=FEW),
    Line(("adaptive/free1",), partial(adaptive_free, rows=1)),
    Line(("adaptive/free4",), partial(adaptive_free, rows=ROWS)),
    Line(("adaptive/copy1",), partial(adaptive_copy, rows=1)),
    Line(("adaptive/copy4",), partial(adaptive_copy, rows=ROWS), last=("adaptive", *FIXED)),
)
