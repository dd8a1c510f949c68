"""One HTTP request's life with the engine: submit, admission, events, and always an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive

from pipeline.errors import ClosedError
from pipeline.server.asked import Asked
from pipeline.server.channel import Channel, Stamped
from pipeline.server.contract import ServedEngine, Ticket
from pipeline.server.errors import ClientGone
from pipeline.server.metrics import Metrics
from pipeline.server.pools import Pools
from pipeline.types import Accepted, Delta, Done, Failed, Usage


@dataclass
class Choice:
    """How far one choice is."""

    accepted: bool = False
    prompt_tokens: int = 0
    thinking: bool = False  # the prompt has opened its reasoning
    # perf_counter, seconds; 0: not yet
    submitted: float = 0.0
    admitted: float = 0.0
    first: float = 0.0  # when its first tokens came
    last: float = 0.0  # when its latest did
    ended: float = 0.0
    tokens: int = 0  # given out so far; an EOS is not among them
    done: Done | None = None

    @property
    def counted(self) -> int:
        """Tokens as usage counts them; of a cut answer, those that were given out."""
        return self.done.usage.completion_tokens if self.done else self.tokens


class Answer:
    """Owns the tickets of one HTTP request. `close` must be called whatever happened."""

    def __init__(self, engine: ServedEngine, asked: Asked, metrics: Metrics, pools: Pools):
        self.asked, self.pools = asked, pools
        self.choices = [Choice() for _ in asked.requests]
        self._engine, self._metrics = engine, metrics
        self._channel = Channel(quiet=not asked.stream)
        self._tickets: list[Ticket] = []
        self._watch: asyncio.Task[None] | None = None
        self._backlog: list[Stamped] = []
        self.began = time.perf_counter()
        self.outcome = "cancelled"  # how it ended
        self.error: Exception | None = None  # what its stream ended with

    async def open(self, receive: Receive) -> None:
        """Submit all choices and wait until each is admitted. Raises what admission refused."""
        self._watch = asyncio.create_task(self._await_hang_up(receive))
        for index, request in enumerate(self.asked.requests):
            self.choices[index].submitted = time.perf_counter()
            self._tickets.append(self._engine.submit(request, partial(self._channel.put, index)))
        while not all(choice.accepted for choice in self.choices):
            self._backlog += await self._next(None)

    async def events(self, timeout_s: float | None = None) -> Sequence[Stamped]:
        """Deltas and ends since the last call; empty after the timeout. Raises ClientGone, and what
        made a choice fail."""
        if self._backlog:
            early, self._backlog = self._backlog, []
            return early
        return await self._next(timeout_s)

    @property
    def finished(self) -> bool:
        """Every choice has ended and all events have been given out."""
        return not self._backlog and all(choice.done for choice in self.choices)

    @property
    def model(self) -> str:
        return str(self._engine.target_info["name"])

    @property
    def usage(self) -> Usage:
        """Prompts are counted once, however many choices each has; what choices share was computed for
        the one of them that led. Of a cut answer, what is known."""
        n = self.asked.n
        usages = [choice.done.usage for choice in self.choices if choice.done]
        led = [usages[i : i + n] for i in range(0, len(usages), n)]
        return Usage(
            sum(choice.prompt_tokens for choice in self.choices[::n]),
            sum(choice.counted for choice in self.choices),
            sum(min(usage.cached_tokens for usage in choices) for choices in led),
            sum(usage.resumed_tokens for usage in usages),
        )

    def close(self) -> None:
        """Cancel what still runs."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # its error holds our frames: a cycle, and the prompt with it
        if not self.finished:
            for ticket in self._tickets:
                ticket.cancel()
        self.outcome = self._ending()
        self._metrics.answered(self.outcome)

    async def _await_hang_up(self, receive: Receive) -> None:
        await hang_up(receive)
        self._channel.hang_up()

    async def _next(self, timeout_s: float | None) -> list[Stamped]:
        items = await self._channel.take(timeout_s)
        if self._channel.gone:
            self.outcome = "client gone"
            raise ClientGone
        return [item for item in items if self._note(self.choices[item.index], item)]

    def _note(self, choice: Choice, item: Stamped) -> bool:
        """Keep the books; whether the event is the reply's business."""
        match item.event:
            case Accepted(prompt_tokens=tokens, thinking=thinking):
                choice.accepted, choice.prompt_tokens, choice.thinking = True, tokens, thinking
                choice.admitted = item.at
                return False
            case Delta(token_ids=ids):
                choice.tokens += len(ids)
                self._time(choice, item.at, len(ids))
            case Done() as done:
                _refuse_cut(done)
                choice.done, choice.ended = done, item.at
                self._metrics.finished(done)
            case Failed(error=error):
                self.outcome = "failed"
                raise error
        return True

    def _time(self, choice: Choice, at: float, tokens: int) -> None:
        if not tokens:
            return
        if choice.last:
            self._metrics.gap.observe((at - choice.last) / tokens)
        else:
            self._metrics.ttft.observe(at - self.began)
            choice.first = at
        choice.last = at

    def _ending(self) -> str:
        if not self.finished:
            return self.outcome
        reasons = {choice.done.finish_reason for choice in self.choices if choice.done}
        return "length" if "length" in reasons else "stop"


async def hang_up(receive: Receive) -> None:
    """Returns once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse_cut(done: Done) -> None:
    """An answer cut short by the engine must not look complete."""
    if done.finish_reason == "cancelled":
        raise ClosedError("The engine stopped before the answer was complete.")
    if done.finish_reason == "error":
        raise RuntimeError("the engine ended a request with finish_reason 'error'")
