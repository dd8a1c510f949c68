"""Against mlx-lm's own server: as shipped, and given the BLAS that Headrace uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.lab import texts
from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.sse import BenchError, Reply

RIVALS = {"shipped": "mlx-lm as shipped", "same": "mlx-lm with our BLAS"}
DECODE_TOKENS = 32
ROWS_TOKENS = 20
PROMPT_TOKENS = 512
PREFIX_TOKENS, ADDED_TOKENS = 200, 12

Measure = Callable[[Contestant, int], tuple[float, Sequence[Reply]]]


def compare(
    bench: Bench,
    name: str,
    title: str,
    promises: Mapping[str, Promise],
    measure: Measure,
    prepare: Callable[[Contestant], object] = lambda one: None,
) -> list[Figure]:
    """Ours and the wanted rivals by turns; a figure a rival."""
    rivals = [rival for rival in promises if f"{name}/{rival}" in bench.wanted]
    rounds = bench.compare(name, ("ours", *rivals), measure, prepare)
    figures = []
    for at, rival in enumerate(rivals, 1):
        pairs = [(results[0][0], results[at][0]) for results in rounds]
        note = agreement(rounds[0][0][1], rounds[0][at][1])
        full = f"{title}, against {RIVALS[rival]}"
        figures.append(ratio(f"{name}/{rival}", full, pairs, promises[rival], note=note))
    return figures


def agreement(ours: Sequence[Reply], theirs: Sequence[Reply]) -> str:
    """The same weights should say the same; where not, where it begins."""
    for index, replies in enumerate(zip(ours, theirs, strict=True)):
        mine, other = (reply.text.lstrip() for reply in replies)  # mlx-lm drops a leading space
        if mine != other:
            at = same_start(mine, other)
            here, there = mine[at : at + 12], other[at : at + 12]
            return f"stream {index + 1} differs at character {at}: {here!r} / {there!r}"
    return "same text"


def same_start(a: str, b: str) -> int:
    """How many leading characters are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def decode(bench: Bench) -> list[Figure]:
    """Tokens a second after the first one; the prompt is short and always the same."""
    prompt = texts.read("continue").splitlines()[0]

    def measure(one: Contestant, index: int) -> tuple[float, Sequence[Reply]]:
        reply = one.complete(prompt, max_tokens=DECODE_TOKENS)
        return reply.rate, [reply]

    promises = {"shipped": Promise(">=", 2.2), "same": Promise(">=", 0.97)}
    return compare(bench, "decode", "decode, one row, tokens/s", promises, measure)


def prefill(bench: Bench) -> list[Figure]:
    """Prompt tokens a second until the first token, of a prompt no cache knows."""
    counter = bench.field.take("ours")[0]
    prompts = [
        texts.cut(texts.prose(1000 + index), PROMPT_TOKENS, counter.count)
        for index in range(bench.pairs)
    ]

    def measure(one: Contestant, index: int) -> tuple[float, Sequence[Reply]]:
        reply = one.complete(prompts[index], max_tokens=1)
        cold(reply)
        return reply.prompt_tokens / reply.first, [reply]

    promises = {"shipped": Promise(">=", 10), "same": Promise(">=", 0.97)}
    return compare(bench, "prefill", "prefill of 512 tokens, tokens/s", promises, measure)


def cold(reply: Reply) -> None:
    if reply.cached > 16:
        raise BenchError(f"{reply.cached} tokens of a prompt meant to be cold came from a cache")


def rows(bench: Bench) -> list[Figure]:
    """Tokens a second of four streams together, while all four are under way."""
    prompts = texts.read("continue").splitlines()
    pool = ThreadPoolExecutor(len(prompts))

    def measure(one: Contestant, index: int) -> tuple[float, Sequence[Reply]]:
        ask = partial(one.complete, max_tokens=ROWS_TOKENS)
        replies = list(pool.map(ask, prompts))
        return together(replies), replies

    promises = {"shipped": Promise(">=", 3.5), "same": Promise(">=", 0.97)}
    with pool:
        return compare(bench, "rows", "four rows, tokens/s of all", promises, measure)


def together(replies: Sequence[Reply]) -> float:
    """Tokens a second from when the last stream has begun to when the first one ends."""
    start = max(reply.began + reply.times[0] for reply in replies)
    stop = min(reply.began + reply.times[-1] for reply in replies)
    if stop <= start:
        raise BenchError("the streams were never all under way at once")
    return sum(reply.tokens_between(start, stop) for reply in replies) / (stop - start)


def warm(bench: Bench) -> list[Figure]:
    """Seconds to the first token of a prompt of which all but twelve tokens are known."""
    counter = bench.field.take("ours")[0]
    prefix = texts.cut(texts.prose(7), PREFIX_TOKENS, counter.count)
    ends = [texts.cut(texts.prose(index), ADDED_TOKENS, counter.count) for index in range(100)]

    def measure(one: Contestant, index: int) -> tuple[float, Sequence[Reply]]:
        reply = one.complete(f"{prefix} {ends[index]}", max_tokens=1)
        if reply.cached < PREFIX_TOKENS - 16:
            raise BenchError(f"{one.name} found {reply.cached} tokens of {reply.prompt_tokens}")
        return reply.first, [reply]

    def known(one: Contestant) -> None:
        one.complete(prefix, max_tokens=1)

    title, promises = "first token on a warm prefix, s", {"shipped": Promise("<=", 0.25)}
    return compare(bench, "warm", title, promises, measure, known)


LINES = (
    Line(("decode/shipped", "decode/same"), decode, rivals=True),
    Line(("rows/shipped", "rows/same"), rows, rivals=True),
    Line(("warm/shipped",), warm, rivals=True, most=FEW),
    Line(("prefill/shipped", "prefill/same"), prefill, rivals=True, most=FEW),
)
