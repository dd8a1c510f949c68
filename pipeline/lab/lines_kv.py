"""What KV policies cost in time, against native, and take in memory, against what they say."""

from __future__ import annotations

import json

from pipeline.lab import texts
from pipeline.lab.contestants import Contestant
from pipeline.lab.figures import Figure, Promise, ratio
from pipeline.lab.lines import FEW, Bench, Line
from pipeline.lab.lines_engine import python

TOKENS = 24  # decoded at each length
POLICIES = ("native", "paged", "kv8", "kv4", "per_layer", "rotated", "turboquant")
MEASURE = """
import json, sys, pipeline
figures = {}
for policy in sys.argv[1:]:
    with pipeline.load("smollm2", f"kv={policy}", "drafter=none", "tier=none") as engine:
        def measure():
            kv, model = engine.pipeline.parts["kv"], engine.pipeline.parts["model"]
            rows = kv.rows(model, 9)
            rows.prepare_append([None]).commit()
            round = rows.begin([list(range(100, 356))])
            round.launch(model.hidden(round.tokens_BW, round.caches))
            round.wait()
            round.resolve([256])
            return rows.nbytes() / 256, kv.bytes_per_token(model)
        figures[policy] = engine.exclusive(measure)
print(json.dumps(figures))
"""


def _decode(bench: Bench, who: str, length: int, bound: float) -> list[Figure]:
    """Tokens a second after a prompt of this length that is known already."""
    counter = bench.field.take("ours")[0]
    prompt = texts.cut(texts.prose(7, 400), length, counter.count)

    def measure(one: Contestant, index: int) -> float:
        return one.complete(prompt, max_tokens=TOKENS, ignore_eos=True).rate

    def known(one: Contestant) -> None:
        one.complete(prompt, max_tokens=1)

    rounds = bench.compare(f"kv/{who}", (who, "ours"), measure, known)
    title = f"decode after {length:,} tokens, kv={who} against native"
    return [ratio(f"kv/{who}", title, [(a, b) for a, b in rounds], Promise(">=", bound))]


def kv8(bench: Bench) -> list[Figure]:
    return _decode(bench, "kv8", 4000, 0.6)


def turboquant(bench: Bench) -> list[Figure]:
    return _decode(bench, "turboquant", 1000, 0.4)


def size(bench: Bench) -> list[Figure]:
    """Bytes that rows of a full buffer (or full blocks) hold a token, against what the policy says."""
    measured: dict[str, list[float]] = json.loads(python(bench, "-c", MEASURE, *POLICIES))
    off = {name: abs(held / said - 1) * 100 for name, (held, said) in measured.items()}
    note = ", ".join(f"{name}: {held:,.0f}" for name, (held, _) in measured.items())
    title = "bytes a token of every policy, off the formula"
    return [Figure("kv/bytes", title, max(off.values()), Promise("<=", 2), "%", note=note)]


LINES = (
    Line(("kv/bytes",), size),
    Line(("kv/kv8",), kv8, last=("kv8",), most=FEW),
    Line(("kv/turboquant",), turboquant, last=("turboquant",), most=FEW),
)
