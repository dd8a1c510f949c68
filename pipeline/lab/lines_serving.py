"""What the HTTP surface costs beside the engine, and many short chats at once beside mlx-lm's server."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pipeline.lab import texts
from pipeline.lab.both_ways import BothWays
from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise, median_interval, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.lines_rivals import agreement
from pipeline.lab.metrics import percentile
from pipeline.lab.sse import BenchError, Reply

Ask = Callable[[Sequence[str], int], list[Reply]]

STREAMS, STREAM_TOKENS = 8, 64
FIRSTS = 20  # first tokens of each way in a round
CHATS, CHAT_TOKENS = 32, 32


def questions(count: int, pass_: int) -> list[str]:
    """Of unequal length, and none asked in another pass."""
    known = texts.read("questions").splitlines()
    return [f"{pass_}.{n + 1} {known[n % len(known)]}" for n in range(count)]


def seconds(replies: Sequence[Reply]) -> float:
    """From the first request to the last token of all."""
    ends = [reply.began + reply.times[-1] for reply in replies]
    return max(ends) - min(reply.began for reply in replies)


def http(bench: Bench) -> list[Figure]:
    """The same questions to the same engine, all of whose prompts are known: over HTTP and by
    `Engine.stream`."""
    asked = questions(STREAMS, 0)
    overrides = ("drafter=none", f"device.threads={bench.threads}")
    with BothWays("smollm2", *overrides, threads=bench.threads, clients=STREAMS) as engine:
        engine.inside(asked, STREAM_TOKENS)

        def generate(ask: Ask, index: int) -> list[Reply]:
            return ask(asked, STREAM_TOKENS)

        ways = (engine.over_http, engine.inside)
        rounds = bench.alternate("http/streams", [partial(generate, ask) for ask in ways])
        firsts = bench.alternate("http/first", [partial(_firsts, ways, asked[:1])])
    return [_added(rounds), _later([both for (both,) in firsts])]


def _firsts(ways: Sequence[Ask], asked: Sequence[str], index: int) -> list[float]:
    """Median seconds of each way. They take turns at single requests: what differs is a twentieth of what is
    measured, and a machine changes by more than that within a second."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(FIRSTS):
        for at in (0, 1) if (turn + index) % 2 else (1, 0):
            times[at].append(ways[at](asked, 1)[0].first)
    return [statistics.median(each) for each in times]


def _added(rounds: Sequence[Sequence[list[Reply]]]) -> Figure:
    pairs = [(seconds(over), seconds(inside)) for over, inside in rounds]
    same = agreement(*rounds[0])
    title = f"{STREAMS} streams over HTTP against Engine.stream, seconds"
    return ratio("http/streams", title, pairs, Promise("<=", 1.03), note=same)


def _later(firsts: Sequence[Sequence[float]]) -> Figure:
    later = [(over - inside) * 1e3 for over, inside in firsts]
    note = f"{statistics.median(inside for _, inside in firsts) * 1e3:.1f} ms by Engine.stream"
    title = "first token over HTTP, later than by Engine.stream"
    interval = median_interval(later)
    value = statistics.median(later)
    return Figure("http/first", title, value, Promise("<=", 2), "ms", interval, later, note)


def chats(bench: Bench) -> list[Figure]:
    """Short chats that come at once, every pass others."""
    pool = ThreadPoolExecutor(CHATS)

    def measure(one: Contestant, index: int) -> list[Reply]:
        ask = partial(one.chat, max_tokens=CHAT_TOKENS)
        replies = list(pool.map(ask, questions(CHATS, index + 1)))
        if any(reply.cached > reply.prompt_tokens // 2 + 16 for reply in replies):
            raise BenchError("a chat meant to be new came from a cache")
        return replies

    def known(one: Contestant) -> None:
        """What all chats begin with is known, as it is to any server after its first minute."""
        list(pool.map(partial(one.chat, max_tokens=2), questions(2, 0)))

    with pool:
        rounds = bench.compare("chats", ("ours32", "same"), measure, known)
    return [_throughput(rounds), _first(rounds)]


def _throughput(rounds: Sequence[Sequence[list[Reply]]]) -> Figure:
    def rate(replies: Sequence[Reply]) -> float:
        return sum(reply.tokens for reply in replies) / seconds(replies)

    pairs = [(rate(ours), rate(theirs)) for ours, theirs in rounds]
    best = f"{pairs[0][0]:.0f} / {pairs[0][1]:.0f} tokens/s; {agreement(*rounds[0])}"
    title = f"{CHATS} short chats at once, max_rows=32, tokens/s, against mlx-lm with our BLAS"
    return ratio("chats/throughput", title, pairs, Promise(">=", 1.0), note=best)


def _first(rounds: Sequence[Sequence[list[Reply]]]) -> Figure:
    def late(replies: Sequence[Reply]) -> float:
        return percentile([reply.first for reply in replies], 0.95) or 0.0

    pairs = [(late(ours), late(theirs)) for ours, theirs in rounds]
    note = f"{pairs[0][0]:.2f} / {pairs[0][1]:.2f} s"
    title = f"{CHATS} short chats at once, p95 to the first token, likewise"
    return ratio("chats/first", title, pairs, Promise("<=", 1.0), note=note)


LINES = (
    Line(("http/streams", "http/first"), http),
    Line(("chats/throughput", "chats/first"), chats, rivals=True, last=("ours32",), most=FEW),
)
