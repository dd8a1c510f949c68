"""Prometheus metrics of one app: its own registry, no state of the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pipeline.server.contract import ServedEngine
from pipeline.types import Done

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """What the server counts itself, beside all plain numbers of `engine.stats()`."""

    def __init__(self, engine: ServedEngine):
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = _counter(registry, "requests", "HTTP replies", "path", "status")
        self._answers = _counter(registry, "answers", "Answers by how they ended", "outcome")
        self._prompt = _counter(registry, "prompt_tokens", "Prompt tokens of complete answers")
        self._cached = _counter(registry, "cached_tokens", "Prompt tokens served from saved state")
        self._resumed = _counter(
            registry, "resumed_tokens", "Tokens drawn before a crash or a disconnect"
        )
        self._completion = _counter(registry, "completion_tokens", "Tokens of complete answers")
        self._drafted = _counter(registry, "drafted_tokens", "Tokens proposed by drafters")
        self._accepted = _counter(registry, "accepted_tokens", "Proposed tokens that were right")
        self.ttft = _seconds(registry, "time_to_first_token", "Arrival to first token")
        self.gap = _seconds(registry, "inter_token", "Between bursts, divided by their tokens")
        registry.register(_EngineGauges(engine))

    def answered(self, outcome: str) -> None:
        self._answers.labels(outcome).inc()

    def finished(self, done: Done) -> None:
        self._prompt.inc(done.usage.prompt_tokens)
        self._cached.inc(done.usage.cached_tokens)
        self._resumed.inc(done.usage.resumed_tokens)
        self._completion.inc(done.usage.completion_tokens)
        self._drafted.inc(done.speculation.drafted)
        self._accepted.inc(done.speculation.accepted)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _EngineGauges(Collector):
    """Every number of `engine.stats()` as gauge `headrace_engine_<path>`."""

    def __init__(self, engine: ServedEngine):
        self._engine = engine

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in _numbers(self._engine.stats(), "headrace_engine"):
            yield GaugeMetricFamily(name, "A number of /stats", value=value)


def _numbers(stats: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in stats.items():
        name = prefix + "_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in str(key))
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif isinstance(value, (int, float)):
            yield name, float(value)


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"headrace_{name}", text, labels, registry=registry)


def _seconds(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(f"headrace_{name}_seconds", text, buckets=_SECONDS, registry=registry)
