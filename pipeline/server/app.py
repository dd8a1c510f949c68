"""The Starlette app over one engine. All state lives in the objects made here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from pipeline.server.adapters import AdapterAdmin
from pipeline.server.admin import Admin
from pipeline.server.assets import Assets
from pipeline.server.bodies import Bodies
from pipeline.server.chat import Chat
from pipeline.server.completions import Completions
from pipeline.server.contract import ServedEngine
from pipeline.server.endpoint import Generation
from pipeline.server.errors import reply
from pipeline.server.front import Front
from pipeline.server.gate import Gate
from pipeline.server.messages import Messages
from pipeline.server.metrics import Metrics
from pipeline.server.models import Models
from pipeline.server.openapi import Description
from pipeline.server.pools import Pools
from pipeline.server.responses import Responses
from pipeline.server.settings import ServerSettings
from pipeline.server.spans.provider import Tracing
from pipeline.server.status import Status
from pipeline.server.tokens import Tokens, routes_of
from pipeline.server.viewers import Viewers
from pipeline.server.writer import Family


def create_app(
    engine: ServedEngine, settings: ServerSettings, tracing: Tracing | None = None
) -> Starlette:
    """The whole HTTP surface of an open engine; starts and stops nothing."""
    metrics = Metrics(engine)
    store, pools = settings.store(), Pools()
    families: dict[str, Family] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/v1/messages": Messages(store, pools),
        "/v1/responses": (responses := Responses(store, pools)),
    }
    routes: list[Route | Mount] = [
        Route(
            path, _endpoint(Generation(engine, settings, metrics, family, pools)), methods=["POST"]
        )
        for path, family in families.items()
    ]
    tokens = routes_of(Tokens(engine, settings, pools))
    routes += [Route(path, answer, methods=["POST"]) for path, answer in tokens.items()]
    routes += [
        Route("/v1/responses/{name}", responses.stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", responses.input_items),
        Route("/openapi.json", Description(pools).answer),
        Route("/v1/models", (models := Models(engine)).all),
        Route("/v1/models/{name:path}", models.one),
        *AdapterAdmin(engine, settings, pools).routes(),
        *_routes(Status(engine, metrics, pools)),
        Route("/", (assets := Assets()).index),
        Route("/events", Viewers(engine, pools).events),
        Mount("/page", assets, name="page"),
        *Admin(engine, settings, pools).routes(),
    ]
    traced = [tracing.middleware(families)] if tracing else []
    app = Starlette(
        routes=routes,
        middleware=[
            *_pages(settings),  # outermost: pages must be able to read errors, too
            Middleware(
                Front, metrics=metrics, paths={r.path for r in routes}, prompts=settings.log_prompts
            ),
            *traced,
            Middleware(Gate, settings=settings, counted={*families, *tokens}),
            Middleware(Bodies, room=settings.bodies_bytes),
        ],
        exception_handlers={HTTPException: reply},
    )
    app.router.redirect_slashes = False
    return app


def _pages(settings: ServerSettings) -> list[Middleware]:
    """Web pages of these origins may read replies; a browser asks first, and needs no key for that."""
    if not settings.cors:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "warning"],
        )
    ]


def _endpoint(family: Generation) -> Callable[[Request], Awaitable[Response]]:
    """Starlette takes an object that can be called for an ASGI app; this is a function."""

    async def answer(request: Request) -> Response:
        return await family(request)

    return answer


def _routes(status: Status) -> list[Route]:
    return [
        Route("/v1/sessions/{name:path}", status.close_session, methods=["DELETE"]),
        Route("/health", status.health),
        Route("/ready", status.ready),
        Route("/stats", status.stats),
        Route("/metrics", status.prometheus),
    ]
