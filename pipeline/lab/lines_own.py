"""Headrace against itself: drafting, sampling, and a prefix that is known already."""

from __future__ import annotations

from functools import partial

from pipeline.lab import texts
from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.sse import BenchError, Reply

SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PLAIN_TOKENS, WIDE_TOKENS = 32, 20
COPY_TOKENS, SHORT_TOKENS = 300, 120
LONG_TOKENS, ADDED_TOKENS = 1000, 16


def _copy(bench: Bench, name: str, title: str, tokens: int, bound: float) -> list[Figure]:
    """Seconds of a whole answer to a prompt that is known already, so of decoding. Same tokens."""
    text = texts.read(name)

    def measure(one: Contestant, index: int) -> Reply:
        return one.chat(text, max_tokens=tokens)

    def known(one: Contestant) -> None:
        one.chat(text, max_tokens=1)

    rounds = bench.compare(name, ("ngram", "ours"), measure, known)
    same = all(a.text == b.text and a.tokens == b.tokens for a, b in rounds)
    pairs = [(ngram.tokens / ngram.seconds, none.tokens / none.seconds) for ngram, none in rounds]
    reply = rounds[0][0]
    note = f"{reply.tokens} tokens in {len(reply.texts)} bursts, {'same text' if same else 'TEXT DIFFERS'}"
    promise = Promise(">=", bound)
    return [ratio(f"ngram/{name[5:]}", title, pairs, promise, note=note, holds=same)]


def copy_clean(bench: Bench) -> list[Figure]:
    title = "drafter=ngram against none, clean copy, depth 16"
    return _copy(bench, "copy_clean", title, COPY_TOKENS, 2.2)


def copy_imperfect(bench: Bench) -> list[Figure]:
    title = "drafter=ngram against none, short imperfect copy"
    return _copy(bench, "copy_imperfect", title, SHORT_TOKENS, 0.9)


def _sampling(bench: Bench, name: str, title: str, who: str, tokens: int) -> list[Figure]:
    """Rounds a second. Where drafts are always wrong, a token is a round."""
    prompt = texts.read("continue").splitlines()[1]
    (one,) = bench.field.take(who)
    ask = partial(one.complete, prompt, max_tokens=tokens, ignore_eos=True)

    def sampled(index: int) -> float:
        return ask(seed=index, **SAMPLED).rate

    def greedy(index: int) -> float:
        return ask().rate

    pairs = [(a, b) for a, b in bench.alternate(name, [sampled, greedy])]
    return [ratio(name, title, pairs, Promise(">=", 0.9))]


def sampling_plain(bench: Bench) -> list[Figure]:
    title = "temperature 0.8, top_p 0.95 against greedy, plain"
    return _sampling(bench, "sampling/plain", title, "ours", PLAIN_TOKENS)


def sampling_wide(bench: Bench) -> list[Figure]:
    title = "temperature 0.8, top_p 0.95 against greedy, width 9, drafts wrong"
    return _sampling(bench, "sampling/wide", title, "wide", WIDE_TOKENS)


def prefix(bench: Bench) -> list[Figure]:
    """First token of a request that goes on from one of 1,000 tokens, against that one's own."""
    (one,) = bench.field.take("ours")
    pairs = []
    for index in range(bench.pairs):
        text = texts.cut(texts.prose(2000 + index, 90), LONG_TOKENS, one.count)
        first = one.complete(text, max_tokens=1)
        more = texts.cut(texts.prose(index), ADDED_TOKENS - 2, one.count)
        second = one.complete(f"{text}{first.text} {more}", max_tokens=1)
        _continues(first, second)
        pairs.append((second.first, first.first))
        bench.say(f"prefix: {index + 1} of {bench.pairs}")
    title = "first token of 1,000 + 16 tokens, against 1,000 cold"
    return [ratio("prefix", title, pairs, Promise("<=", 0.06))]


def _continues(first: Reply, second: Reply) -> None:
    added = second.prompt_tokens - first.prompt_tokens
    if first.cached > 16 or not 0 < added <= ADDED_TOKENS:
        raise BenchError(f"not 1,000 cold and 16 more: {first.cached} known, {added} added")


LINES = (
    Line(("prefix",), prefix, most=FEW),
    Line(("sampling/plain",), sampling_plain, most=FEW),
    Line(("sampling/wide",), sampling_wide, last=("wide",), most=FEW),
    Line(("ngram/clean",), copy_clean, most=FEW),
    Line(("ngram/imperfect",), copy_imperfect, last=("ngram",), most=FEW),
)
