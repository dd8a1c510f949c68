"""Asks a contestant what a workload says, at its times, and keeps what came back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.lab.contestants import Contestant
from pipeline.lab.sse import Refused, Reply
from pipeline.lab.workload import Arrival
from pipeline.types import Request

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass
class Pass:
    """One pass of a workload: a reply an arrival, in order, and what the server counted meanwhile."""

    replies: list[Reply]
    seconds: float
    counted: Mapping[str, Any] = field(default_factory=dict)  # of /stats: after, less before
    peak_bytes: int | None = None  # most resident memory; None: not known on this system
    forms: Sequence[bool] = ()  # which answers should have had a form
    blas: str = ""  # what multiplied, as the server says; empty where it does not say


def drive(one: Contestant, arrivals: Sequence[Arrival], clients: int) -> Pass:
    """BenchError if a request is refused or breaks off. Each waits for its time and for a client."""
    before = stats(one)
    one.forget_peak()
    began = time.perf_counter()

    def ask(arrival: Arrival) -> Reply:
        time.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        path, said = body(arrival.request)
        return one.post(path, said, arrival.leave_after)

    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(ask, arrivals))
    seconds = time.perf_counter() - began
    forms = [arrival.request.grammar is not None for arrival in arrivals]
    counted, peak = less(stats(one), before), one.peak_bytes()
    return Pass(replies, seconds, counted, peak, forms, one.blas())


def body(request: Request) -> tuple[str, dict[str, Any]]:
    """Path and JSON of a Request in OpenAI's form, which every contestant takes."""
    said: dict[str, Any] = {"max_tokens": request.max_tokens}
    chosen = {name: getattr(request.sampling, name) for name in SAMPLING}
    said |= {name: value for name, value in chosen.items() if value is not None}
    if request.stop:
        said["stop"] = list(request.stop)
    if request.grammar is not None:
        schema = {"name": "form", "schema": json.loads(request.grammar.source)}
        said["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.messages is None:
        return "/v1/completions", {"prompt": request.text, **said}
    return "/v1/chat/completions", {"messages": list(request.messages), **said}


def stats(one: Contestant) -> Mapping[str, Any]:
    """What it tells of itself; empty for contestants that do not."""
    try:
        found: Mapping[str, Any] = json.loads(one.get("/stats"))
    except (Refused, ValueError):
        return {}
    return found


def less(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, stage seconds and rounds by width of the time between two calls of /stats; the KV
    policy's figures as they are."""
    if not after:
        return {}
    found: dict[str, Any] = {"kv": after["kv"]}
    for name in ("counts", "stage_seconds"):
        old = before[name]
        found[name] = {key: value - old.get(key, 0) for key, value in after[name].items()}
    known = {(one["rows"], one["width"]): one for one in before["widths"]}
    found["widths"] = [
        _since(one, known.get((one["rows"], one["width"]))) for one in after["widths"]
    ]
    return found


def _since(one: Mapping[str, Any], old: Mapping[str, Any] | None) -> dict[str, Any]:
    old = old or {"rounds": 0, "seconds": 0.0}
    spent = {key: one[key] - old[key] for key in ("rounds", "seconds")}
    return {**one, **spent}
