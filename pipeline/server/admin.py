"""What only the operator may: write saved states down, empty the server, have the machine to oneself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pipeline.server.answer import hang_up
from pipeline.server.caller import admin_only
from pipeline.server.contract import Leases, ServedEngine
from pipeline.server.errors import JSON, dump
from pipeline.server.pools import Pools
from pipeline.server.settings import ServerSettings

LOOK_S = 0.05  # how soon a client hears that its lease has begun, or is over


@dataclass(frozen=True)
class Admin:
    """Endpoints below /admin."""

    engine: ServedEngine
    settings: ServerSettings
    pools: Pools

    def routes(self) -> list[Route]:
        return [
            Route("/admin/cache/flush", self.flush, methods=["POST"]),
            Route("/admin/drain", self.drain, methods=["POST"]),
            Route("/admin/lease", self.lease, methods=["POST"]),
        ]

    async def flush(self, request: Request) -> Response:
        """200 if all saved state is on disk now, else 503; either way with the figures."""
        admin_only(request)
        report = await self.pools.wait(self.engine.flush)
        return JSON(report, 200 if report["durable"] else 503)

    async def drain(self, request: Request) -> Response:
        """No more requests from now on, until the process ends; 200 once the running ones have ended, 503 if they
        have not within `shutdown_s`. Then a flush, which is told but decides nothing: without a disk there is
        none to be had."""
        admin_only(request)
        drained = await self.pools.wait(self.engine.drain, self.settings.shutdown_s)
        flushed: Any = await self.pools.wait(self.engine.flush) if drained else None
        return JSON({"drained": drained, "flush": flushed}, 200 if drained else 503)

    async def lease(self, request: Request) -> Response:
        """The engine stands still while this connection lasts: see `Lease`."""
        admin_only(request)
        return Lease(self.engine.leases, self.pools, self.settings.keepalive_s)


class Lease(Response):
    """A stream of JSON lines: `{"lease": "waiting"}` while running answers end, `{"lease": "held"}`, blank
    ones as a sign of life, and `{"lease": "over"}` if the server takes it back. The connection owns it: when that
    ends, however it does, the lease is given back."""

    media_type = "application/x-ndjson"

    def __init__(self, leases: Leases, pools: Pools, keepalive_s: float):
        super().__init__()
        del self.headers["content-length"]
        self._leases, self._pools, self._keepalive_s = leases, pools, keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = uuid4().hex
        gone = asyncio.create_task(hang_up(receive))
        try:
            await self._pools.figures(self._leases.take, name)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for line in self._lines(name, gone):
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # nobody reads
        finally:
            gone.cancel()
            await asyncio.shield(self._pools.figures(self._leases.release, name))

    async def _lines(self, name: str, gone: asyncio.Task[None]) -> AsyncIterator[bytes]:
        told, silent_s = "", 0.0
        while told != "over" and not gone.done():
            state = await self._pools.figures(self._leases.state, name)
            if state != told:
                yield dump({"lease": state}) + b"\n"
            elif silent_s >= self._keepalive_s:
                yield b"\n"
            else:
                await asyncio.wait([gone], timeout=LOOK_S)
                silent_s += LOOK_S
                continue
            told, silent_s = state, 0.0
