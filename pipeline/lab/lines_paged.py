"""What sharing blocks gains with many rows on one prompt, and what it costs a row by itself."""

from __future__ import annotations

import json

from pipeline.lab import texts
from pipeline.lab.children import output
from pipeline.lab.contestants import Contestant, environment
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.sse import Reply

LONG_TOKENS, DECODED = 4000, 24
ROWS, PREFIX_TOKENS = 8, 2000
SHARED = """
import json, queue, sys, pipeline
rows, length = map(int, sys.argv[1:])
settings = ("drafter=none", "kv=paged", "tier=ram", f"limits.max_rows={rows}")
with pipeline.load("smollm2", *settings) as engine:
    import mlx.core as mx
    kv, model = (engine.pipeline.parts[name] for name in ("kv", "model"))
    empty = engine.exclusive(mx.get_active_memory)
    prefix = [1000 + i * i * 31 % 40000 for i in range(length)]
    engine.generate(prefix, max_tokens=1)
    ended, seen = queue.SimpleQueue(), []
    def deliver(event):  # on the owner's thread
        stats = engine.stats()
        if stats["rows"]["active"] == rows:
            seen.append((stats["kv_bytes"], mx.get_active_memory() - empty))
        if type(event).__name__ in ("Done", "Failed"):
            ended.put(event)
    for row in range(rows):
        prompt = [*prefix, *range(2000 + 20 * row, 2012 + 20 * row)]
        engine.submit(engine.request(prompt, max_tokens=24, ignore_eos=True), deliver)
    cached = [ended.get().usage.cached_tokens for _ in range(rows)]
    one = length * engine.exclusive(lambda: kv.bytes_per_token(model))
    print(json.dumps([one, cached, *map(max, zip(*seen))]))
"""


def decode(bench: Bench) -> list[Figure]:
    """Tokens a second after a prompt that both know already, of the answer alone."""
    counter = bench.field.take("ours")[0]
    text = texts.cut(texts.prose(4000, 400), LONG_TOKENS, counter.count)

    def measure(one: Contestant, index: int = 0) -> Reply:
        return one.complete(text, max_tokens=DECODED, ignore_eos=True)

    rounds = bench.compare("paged/decode", ("paged", "ours"), measure, measure)
    same = all(a.text == b.text for a, b in rounds)
    pairs = [(paged.rate, native.rate) for paged, native in rounds]
    title = "kv=paged against native, decoding behind 4,000 tokens"
    note = "same text" if same else "TEXT DIFFERS"
    return [ratio("paged/decode", title, pairs, Promise(">=", 0.45), note=note, holds=same)]


def shared(bench: Bench) -> list[Figure]:
    """Bytes of the rows' blocks at their most, their own 36 tokens included, over the prefix's."""
    command = ["-c", SHARED, str(ROWS), str(PREFIX_TOKENS)]
    told = output(command, environment(bench.threads))
    one, cached, blocks, memory = json.loads(told.splitlines()[-1])
    note = (
        f"{blocks / 1e6:.0f} of {one / 1e6:.0f} MB; all that MLX holds for it {memory / 1e6:.0f} MB"
    )
    title = f"kv=paged, {ROWS} rows with a prefix of 2,000 tokens, bytes of one"
    promise, holds = Promise("<=", 1.3), min(cached) == PREFIX_TOKENS
    return [Figure("paged/prefix", title, blocks / one, promise, note=note, holds=holds)]


LINES = (
    Line(("paged/decode",), decode, last=("paged",), most=FEW),
    Line(("paged/prefix",), shared),
)
