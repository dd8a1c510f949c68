"""What is wanted, what is turned for it, and when one choice beats another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.lab.metrics import METRICS
from pipeline.lab.sweep import Row
from pipeline.lab.tables import median, with_unit

LEAST_GAIN = 0.03  # less than this is not worth another setting
LEAST_REPEATS = 3  # of two that are alike, all 3 of one are better once in 20 times


@dataclass(frozen=True)
class Knob:
    """One thing to choose. `candidates` are what one would type, each of one or more overrides."""

    name: str
    candidates: tuple[str, ...]
    drafts: bool = False  # only where somebody drafts
    quality: bool = False  # it changes answers: held to the floor


KNOBS = (
    Knob(
        "kv",
        ("kv=native", "kv=paged", "kv=kv8", "kv=turboquant", "kv=rotated", "kv=kv4"),
        quality=True,
    ),
    Knob(
        "drafter",
        (
            "flow=speculative drafter=none",
            "flow=speculative drafter=ngram",
            "flow=speculative drafter=suffix",
            "flow=speculative drafter=cascade",
        ),
    ),
    Knob(
        "depth",
        (
            "depth=fixed depth.max=4",
            "depth=fixed depth.max=8",
            "depth=fixed depth.max=16",
            "depth=adaptive",
        ),
        drafts=True,
    ),
    Knob("chunk", tuple(f"stage.chunked_prefill.chunk={n}" for n in (128, 256, 512, 1024))),
    Knob("rows", tuple(f"limits.max_rows={n}" for n in (1, 2, 4, 8, 16))),
)


@dataclass(frozen=True)
class Goal:
    """`metrics`: knob -> the figure that decides about it; "" is for all others. `left`: knobs that
    this goal says nothing about, and why. `asks`: overrides of the workload."""

    title: str
    metrics: Mapping[str, str]
    left: Mapping[str, str]
    asks: tuple[str, ...] = ()

    def metric(self, knob: Knob) -> str:
        return self.metrics.get(knob.name, self.metrics[""])


ONE = "one client at a time does not show what rows cost"
GOALS: Mapping[str, Goal] = {
    "latency": Goal("answers of one client as soon as possible", {"": "seconds"}, {"rows": ONE}),
    "throughput": Goal(
        "as many tokens a second as possible, whoever waits",
        {"": "tokens_per_s"},
        {},
        ("workload.clients=16", "workload.requests=16", "workload.max_tokens=32"),
    ),
    "memory": Goal(
        "as few bytes a token of context as the floor allows; then as quick as that can be",
        {"kv": "kv_bytes_per_token", "": "seconds"},
        {"rows": ONE},
    ),
}


@dataclass(frozen=True)
class Verdict:
    """What was thought of one candidate."""

    row: Row
    better: bool
    why: str


def refusal(row: Row, floor: float | None) -> str:
    """Why a row cannot be chosen, whatever it gains; empty if it can. `floor` is None where answers
    are the same for all candidates."""
    if row.reason:
        return f"refused: {row.reason}"
    top1, kl = median(row, "top1"), median(row, "kl")
    if floor is None or top1 is None:
        return ""
    if top1 < floor:
        return f"below the floor: top-1 {top1:.3f} < {floor:g}"
    if floor == 1 and kl:
        return f"below the floor: KL {kl:.2g}, and 1 allows none"
    return ""


def judge(row: Row, best: Row, metric: str, floor: float | None) -> Verdict:
    """Against the best so far: better by enough, and even its worst repeat better than the other's best."""
    if why := refusal(row, floor):
        return Verdict(row, False, why)
    value, held = row.figure(metric), best.figure(metric)
    if value is None or held is None:
        return Verdict(row, False, f"has no {metric}")
    if row is best:
        return Verdict(row, False, "what the others are compared with")
    if not held["median"]:  # a model that keeps no tokens has no bytes of them to save
        return Verdict(row, False, f"no better than {best.label}: {told(best, metric)}")
    less = METRICS[metric].better == "less"
    gain = value["median"] / held["median"] - 1
    gain = -gain if less else gain
    apart = value["high"] < held["low"] if less else value["low"] > held["high"]
    said = f"{abs(gain):.1%} {'better' if gain > 0 else 'worse'} than {best.label}"
    if gain >= LEAST_GAIN and apart:
        return Verdict(row, True, said)
    enough = (
        "too little to count" if 0 <= gain < LEAST_GAIN else "within the spread" if gain > 0 else ""
    )
    return Verdict(row, False, f"{said}, {enough}" if enough else said)


def told(row: Row, metric: str) -> str:
    """A figure with its range."""
    figure = row.figure(metric)
    if figure is None:
        return "–"
    ends = [with_unit(metric, figure[end]) for end in ("low", "high")]
    spread = "" if ends[0] == ends[1] else f" [{ends[0]}, {ends[1]}]"
    return f"{with_unit(metric, figure['median'])}{spread}"
