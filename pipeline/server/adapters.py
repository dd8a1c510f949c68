"""Adapters that come and go while the server runs: for the operator, by names on the shelf."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pipeline.server.body import read_body
from pipeline.server.caller import admin_only
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import JSON
from pipeline.server.neutral import check_neutral, warning
from pipeline.server.pools import Pools
from pipeline.server.schema import Body, read
from pipeline.server.settings import ServerSettings


class MountBody(Body):
    """`folder` is the name of a folder on the shelf (`adapters.shelf`), the id where it is not said."""

    id: str
    folder: str | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class AdapterAdmin:
    """Endpoints below /admin/adapters. Who mounts or unmounts waits for the running answers to end, and for a lease,
    in a thread: one at a time, or no thread would be left for others who wait."""

    engine: ServedEngine
    settings: ServerSettings
    pools: Pools
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[Route]:
        return [
            Route("/admin/adapters", self.listed),
            Route("/admin/adapters", self.mount, methods=["POST"]),
            Route("/admin/adapters/{name}", self.unmount, methods=["DELETE"]),
        ]

    async def listed(self, request: Request) -> Response:
        admin_only(request)
        return JSON(
            {"object": "list", "data": await self.pools.figures(self.engine.adapters.listed)}
        )

    async def mount(self, request: Request) -> Response:
        """Mounted, or 400 with everything that is wrong with it; in the place of what had its id."""
        admin_only(request)
        body = await read_body(request, self.settings, self.pools, partial(read, MountBody))
        unknown = check_neutral(body.model_extra)
        asked = body.id, body.folder or body.id, body.scale
        async with self.turn:
            found = await self.pools.wait(self.engine.adapters.mount_shelved, *asked)
        return JSON(found, headers=warning(unknown))

    async def unmount(self, request: Request) -> Response:
        """204; 404 for an id that is not mounted, 400 for the default."""
        admin_only(request)
        async with self.turn:
            await self.pools.wait(self.engine.adapters.unmount, request.path_params["name"])
        return Response(status_code=204)
