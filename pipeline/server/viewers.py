"""GET /events: what the page shows, pushed to all who look at it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pipeline.errors import BusyError
from pipeline.server.caller import Caller, caller, shown_device
from pipeline.server.contract import ServedEngine
from pipeline.server.pools import Pools, Shared
from pipeline.server.streaming import HEADERS
from pipeline.server.writer import frame

PERIOD_S = 1.0  # between two looks at the engine
SEATS = 16  # viewers of one key, or without keys of one address


class Viewers:
    """First an event `pipeline`: what is served, with its settings (which have paths in them) for the operator
    only; then `figures`, all of /stats. They are taken at most once a period for all viewers together, and not at
    all while there are none."""

    def __init__(self, engine: ServedEngine, pools: Pools, period_s: float = PERIOD_S):
        self._engine, self._pools, self._period_s = engine, pools, period_s
        self._instance = uuid4().hex  # another one: the server has been started again
        self._next = Shared(self._take)  # the next figures, and whether others may follow
        self._taken = -period_s  # when, monotonic seconds
        self._served: dict[str, Any] | None = None
        self._seats: Counter[str] = Counter()

    async def events(self, request: Request) -> Response:
        viewer = caller(request)
        return _Events(self._news(viewer), self._seat(viewer.name or viewer.address))

    @contextlib.contextmanager
    def _seat(self, name: str) -> Iterator[None]:
        if self._seats[name] >= SEATS:
            message = f"As many pages as may ({SEATS}) look on for this key already."
            raise BusyError(message, code="concurrency_limit_exceeded")
        self._seats[name] += 1
        try:
            yield
        finally:
            self._seats[name] -= 1
            self._seats += Counter()  # forgets who has none

    async def _news(self, viewer: Caller) -> AsyncIterator[bytes]:
        if self._served is None:
            self._served = await self._pools.figures(self._describe)
        served = {**self._served, "device": shown_device(self._served["device"], viewer)}
        yield frame(served if viewer.operator else {**served, "settings": []}, "pipeline")
        going = True
        while going:
            figures, going = await self._next()
            yield figures

    async def _take(self) -> tuple[bytes, bool]:
        await asyncio.sleep(self._taken + self._period_s - time.monotonic())
        stats = await self._pools.figures(self._engine.stats)
        self._taken = time.monotonic()
        going = stats["state"] in ("open", "draining", "restarting")
        return frame({"at": self._taken, **stats}, "figures"), going

    def _describe(self) -> dict[str, Any]:
        info, health = self._engine.target_info, self._engine.health()
        served: dict[str, Any] = {"instance": self._instance, "model": info["name"]}
        served |= {"context": info["context_len"], "device": health["device"]}
        return {**served, **self._engine.describe()}


class _Events(StreamingResponse):
    """Takes its seat before anything is waited for, and has it while it lasts."""

    media_type = "text/event-stream"

    def __init__(self, news: AsyncIterator[bytes], seat: AbstractContextManager[None]):
        super().__init__(news, headers=HEADERS)
        self._seat = seat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._seat:
            await super().__call__(scope, receive, send)
