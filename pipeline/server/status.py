"""What operators ask: health, readiness, figures."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from pipeline.server.caller import caller, shown_device
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import JSON, dump
from pipeline.server.metrics import Metrics
from pipeline.server.pools import Pools, Shared


class Status:
    """Endpoints that read; none waits for the engine thread."""

    def __init__(self, engine: ServedEngine, metrics: Metrics, pools: Pools):
        self.engine, self.metrics, self.pools = engine, metrics, pools
        self._figures = Shared(lambda: pools.figures(lambda: dump(engine.stats())))

    async def close_session(self, request: Request) -> Response:
        """204, whether the session was known or not: it is affinity, and nothing is lost with it."""
        name = caller(request).session(request.path_params["name"])
        await self.pools.figures(self.engine.close_session, name)
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """200 while the engine thread lives, else 503; with BLAS and device for who has a key."""
        health = self.engine.health()
        if not (viewer := caller(request)).known:
            health = {name: health[name] for name in ("status", "state")}
        else:
            health = {**health, "device": shown_device(health["device"], viewer)}
        return JSON(health, 200 if health["status"] == "ok" else 503)

    async def ready(self, request: Request) -> Response:
        """200 while requests are taken, else 503."""
        ready = self.engine.health()["state"] == "open"
        return JSON({"ready": ready}, 200 if ready else 503)

    async def stats(self, request: Request) -> Response:
        return Response(await self._figures(), media_type="application/json")

    async def prometheus(self, request: Request) -> Response:
        text = await self.pools.figures(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
