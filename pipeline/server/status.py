"""What operators ask: health, readiness, figures."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from pipeline.server.caller import caller
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import JSON
from pipeline.server.metrics import Metrics
from pipeline.server.pools import Pools


@dataclass(frozen=True)
class Status:
    """Endpoints that read; none waits for the engine thread."""

    engine: ServedEngine
    metrics: Metrics
    pools: Pools

    async def close_session(self, request: Request) -> Response:
        """204, whether the session was known or not: it is affinity, and nothing is lost with it."""
        name = caller(request).session(request.path_params["name"])
        await self.pools.figures(self.engine.close_session, name)
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """200 while the engine thread lives, else 503; with BLAS and device for who has a key."""
        health = self.engine.health()
        if not caller(request).known:
            health = {name: health[name] for name in ("status", "state")}
        return JSON(health, 200 if health["status"] == "ok" else 503)

    async def ready(self, request: Request) -> Response:
        """200 while requests are taken, else 503."""
        ready = self.engine.health()["state"] == "open"
        return JSON({"ready": ready}, 200 if ready else 503)

    async def stats(self, request: Request) -> Response:
        return JSON(await self.pools.figures(self.engine.stats))

    async def prometheus(self, request: Request) -> Response:
        text = await self.pools.figures(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
