"""The figures of a measurement: their names, units, which way is better, and how they are computed."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.lab.driving import Pass

MB = 1e6


@dataclass(frozen=True)
class Metric:
    """`of` gives a pass's figure, or None where it has none; without it, it is `quality`'s."""

    title: str
    unit: str
    better: str  # "more", "less", or "" where neither is
    of: Callable[[Pass], float | None] | None
    kind: str = ""  # speed, memory or quality: the axes of the report's plots
    gives: str = ""  # what a workload must have for it: forms, leave; empty: any


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest of them that at least `share` of them do not exceed (nearest rank)."""
    found = sorted(values)
    return found[max(0, math.ceil(share * len(found)) - 1)] if found else None


def gaps(done: Pass) -> list[float]:
    """Milliseconds between two pieces of text of one answer. A piece may hold several tokens."""
    return [1e3 * (b - a) for reply in done.replies for a, b in pairwise(reply.times)]


def firsts(done: Pass) -> list[float]:
    return [1e3 * reply.first for reply in done.replies]


def rates(done: Pass) -> list[float]:
    """Tokens a second of each answer after its first piece."""
    long = [reply for reply in done.replies if len(reply.times) > 1 and not reply.left]
    return [reply.rate for reply in long]


def tokens(done: Pass) -> int:
    return sum(reply.tokens for reply in done.replies)


def by_position(done: Pass) -> dict[str, list[int]]:
    """How many proposals reached a position, and how many were right up to it."""
    found: dict[str, list[int]] = {}
    for name in ("drafted", "accepted"):
        books = [reply.told.get("speculation", {}) for reply in done.replies]
        lists = [book.get(f"{name}_by_position", ()) for book in books]
        width = max(map(len, lists), default=0)
        found[name] = [sum(one[i] for one in lists if i < len(one)) for i in range(width)]
    return found


def acceptance(done: Pass) -> float | None:
    drafted = _count(done, "drafted")
    return _count(done, "accepted") / drafted if drafted else None


def tokens_a_round(done: Pass) -> float | None:
    """Of one row: what a round of decoding delivers."""
    books = [reply.told["speculation"] for reply in done.replies if "speculation" in reply.told]
    rounds = sum(book["rounds"] for book in books)
    told = sum(reply.tokens for reply in done.replies if reply.told)
    return told / rounds if rounds else None


def valid(done: Pass) -> float | None:
    """Share of the answers that should have a form and are whole JSON."""
    asked = zip(done.replies, done.forms, strict=True)
    wanted = [reply for reply, form in asked if form and not reply.left]
    return statistics.fmean(_is_json(reply.text) for reply in wanted) if wanted else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _count(done: Pass, name: str) -> int:
    return int(done.counted.get("counts", {}).get(name, 0))


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _per_token(done: Pass) -> float | None:
    size = done.counted.get("kv", {}).get("bytes_per_token")
    return None if size is None else float(size)


METRICS: Mapping[str, Metric] = {
    "tokens_per_s": Metric(
        "tokens a second in all", "/s", "more", lambda p: tokens(p) / p.seconds, "speed"
    ),
    "request_tokens_per_s": Metric(
        "tokens a second of one answer", "/s", "more", lambda p: _middle(rates(p)), "speed"
    ),
    "ttft_ms": Metric(
        "time to first token, p50", "ms", "less", lambda p: percentile(firsts(p), 0.5), "speed"
    ),
    "ttft_p95_ms": Metric(
        "time to first token, p95", "ms", "less", lambda p: percentile(firsts(p), 0.95), "speed"
    ),
    "gap_p50_ms": Metric("gap, p50", "ms", "less", lambda p: percentile(gaps(p), 0.5), "speed"),
    "gap_p95_ms": Metric("gap, p95", "ms", "less", lambda p: percentile(gaps(p), 0.95), "speed"),
    "gap_p99_ms": Metric("gap, p99", "ms", "less", lambda p: percentile(gaps(p), 0.99), "speed"),
    "seconds": Metric("seconds of a pass", "s", "less", lambda p: p.seconds, "speed"),
    "acceptance": Metric("share of drafts accepted", "%", "more", acceptance, gives="drafts"),
    "tokens_per_round": Metric("tokens a round", "", "more", tokens_a_round),
    "prompt_tokens": Metric(
        "prompt tokens", "", "", lambda p: sum(r.prompt_tokens for r in p.replies)
    ),
    "completion_tokens": Metric("tokens answered", "", "", tokens),
    "cached_tokens": Metric(
        "prompt tokens from saved state", "", "more", lambda p: sum(r.cached for r in p.replies)
    ),
    "left": Metric(
        "clients that hung up", "", "", lambda p: sum(r.left for r in p.replies) or None, gives="leave"
    ),
    "json_valid": Metric(
        "answers that are JSON", "%", "more", valid, kind="quality", gives="forms"
    ),
    "peak_mb": Metric(
        "most resident memory", "MB", "less",
        lambda p: p.peak_bytes and p.peak_bytes / MB, "memory",
    ),
    "kv_bytes_per_token": Metric("bytes a KV token", "B", "less", _per_token, "memory"),
    "kl": Metric("KL to kv=native", "nats", "less", None, "quality"),
    "top1": Metric("top-1 agreement with kv=native", "%", "more", None, "quality"),
    "perplexity": Metric("perplexity", "", "less", None, "quality"),
}  # fmt: skip
QUALITY = tuple(name for name, metric in METRICS.items() if metric.of is None)


def figures(passes: Sequence[Pass]) -> dict[str, dict[str, Any]]:
    """Metric -> median, lowest, highest and all samples, a sample a pass. Metrics that no pass has
    are left out."""
    found = {}
    for name, metric in METRICS.items():
        given = [metric.of(one) for one in passes] if metric.of else []
        if samples := [value for value in given if value is not None]:
            found[name] = spread(samples)
    return found


def spread(samples: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(samples),
        "low": min(samples),
        "high": max(samples),
        "samples": list(samples),
    }


def totals(passes: Sequence[Pass]) -> dict[str, Any]:
    """What is no single number: acceptance by position, seconds a stage, rounds by width; over all passes."""
    drafted, accepted = Counter[int](), Counter[int]()
    stages, widths = Counter[str](), dict[tuple[int, int], list[float]]()
    for one in passes:
        books = by_position(one)
        drafted.update(dict(enumerate(books["drafted"])))
        accepted.update(dict(enumerate(books["accepted"])))
        stages.update(one.counted.get("stage_seconds", {}))
        for entry in one.counted.get("widths", ()):
            told = widths.setdefault((entry["rows"], entry["width"]), [0, 0.0])
            told[0] += entry["rounds"]
            told[1] += entry["seconds"]
    return {
        "drafted_by_position": [drafted[at] for at in range(len(drafted))],
        "accepted_by_position": [accepted[at] for at in range(len(drafted))],
        "stage_seconds": dict(stages),
        "widths": [
            {"rows": rows, "width": width, "rounds": int(rounds), "seconds": seconds}
            for (rows, width), (rounds, seconds) in sorted(widths.items())
            if rounds
        ],
    }
