"""Clients share the server by tokens, in proportion to their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from pipeline.errors import below, outside, refuse
from pipeline.types import Sequence
from stages.schedulers.fifo import Fifo

WEIGHTS = 1e-6, 1e6  # so that rates, and tags, are numbers whatever the priority
MAX_STEPS = 8  # priorities beyond count as this many steps


class Flow(NamedTuple):
    """Requests that wait for each other."""

    client: str
    priority: int
    weight: float  # of the client, as its requests say


class Fair(Fifo):
    """Self-clocked fair queueing (Golestani, INFOCOM 1994), with tokens as the length of a job.

    Each client is a flow; so is each priority of a client, with its rate multiplied by
    `priority_factor` a step. A request's tag is max(clock at its arrival, tag of the flow's request
    before it) + tokens / rate; the smallest tag starts next, ties by arrival; the clock is the largest
    tag that has started. A tag's clock is fixed at arrival and every start moves the clock on, so
    nobody is overtaken for ever, whatever the weights. An answer's length is taken to be
    `answer_tokens` until it has ended; then the flow is charged what was really computed, so a saved
    prefix and a request that was given up cost nothing. A parked row has been charged already.

    Nothing is kept of flows that have caught up with the clock. ValueError names a setting that is
    out of range.
    """

    can = frozenset({"priority"})

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        priority_factor: float = 2.0,
        answer_tokens: int = 256,
        step_tokens: int | None = 256,
    ) -> None:
        self.weights = dict(weights or {})
        least, most = WEIGHTS
        wrong = {name: w for name, w in self.weights.items() if not least <= w <= most}
        refuse(
            weights=f"wants {least:g} to {most:g}, got {wrong}" if wrong else "",
            priority_factor=outside(priority_factor, 1, 16),
            answer_tokens=below(answer_tokens, 1),
            step_tokens=below(step_tokens, 1, "tokens"),
        )
        super().__init__(step_tokens=step_tokens)
        self.priority_factor, self.answer_tokens = priority_factor, answer_tokens
        self.clock = 0.0
        self._charged: dict[Flow, float] = {}  # tag of the flow's last started request
        self._arrived: dict[int, tuple[Flow, float]] = {}  # id of who waits -> flow, clock then
        self._running: dict[int, tuple[Flow, int]] = {}  # id of who has had a row -> flow, estimate

    def order(self, waiting: Seq[Sequence], active: Seq[Sequence]) -> list[Sequence]:
        tags = self._tags(waiting)
        return sorted(waiting, key=lambda sequence: tags[id(sequence)])

    def started(self, sequence: Sequence) -> None:
        """The flow is charged the estimate, as if the sequence were the first of its flow to wait:
        the engine starts a flow's requests in their order."""
        tag = self._tags([sequence])[id(sequence)]
        flow, _ = self._arrived.pop(id(sequence))
        self._running.setdefault(id(sequence), (flow, self._estimate(sequence)))
        self._charged[flow] = tag
        self.clock = max(self.clock, tag)

    def finished(self, sequence: Sequence) -> None:
        """Correct the estimate of one that had started; forget idle flows that owe nothing."""
        self._arrived.pop(id(sequence), None)
        if id(sequence) in self._running:
            flow, estimate = self._running.pop(id(sequence))
            computed = len(sequence.processed_ids) - sequence.cached_len
            self._charged[flow] += (computed - estimate) / self._rate(flow)
        busy = {flow for flow, _ in [*self._arrived.values(), *self._running.values()]}
        self._charged = {f: t for f, t in self._charged.items() if t > self.clock or f in busy}

    def _tags(self, waiting: Seq[Sequence]) -> dict[int, float]:
        """id -> tag of every waiting sequence, each flow's in order of arrival."""
        last: dict[Flow, float] = defaultdict(float, self._charged)
        tags = {}
        for sequence in waiting:
            arrival = (_flow(sequence), self.clock)
            flow, since = self._arrived.setdefault(id(sequence), arrival)
            due = 0 if id(sequence) in self._running else self._estimate(sequence)
            last[flow] = max(since, last[flow]) + due / self._rate(flow)
            tags[id(sequence)] = last[flow]
        return tags

    def _estimate(self, sequence: Sequence) -> int:
        return len(sequence.prompt_ids) + min(sequence.max_new, self.answer_tokens)

    def _rate(self, flow: Flow) -> float:
        steps = max(-MAX_STEPS, min(MAX_STEPS, flow.priority))
        weight = self.weights.get(flow.client, flow.weight)
        return float(weight * self.priority_factor**steps)


def _flow(sequence: Sequence) -> Flow:
    request = sequence.request
    return Flow(request.client, request.priority, request.weight)
