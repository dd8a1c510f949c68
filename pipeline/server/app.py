"""The Starlette app over one engine. All state lives in the objects made here."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.errors import HeadraceError
from pipeline.server.completions import Completions
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import ClientGone, reply
from pipeline.server.metrics import Metrics
from pipeline.server.settings import ServerSettings
from pipeline.server.status import Status

_ESCAPES = (HeadraceError, HTTPException, ClientGone, ClientDisconnect, Exception)


def create_app(engine: ServedEngine, settings: ServerSettings) -> Starlette:
    """The whole HTTP surface of an open engine; starts and stops nothing."""
    metrics = Metrics(engine)
    routes = _routes(Completions(engine, settings, metrics), Status(engine, metrics))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(CountReplies, metrics=metrics, paths={r.path for r in routes})],
        exception_handlers=dict.fromkeys(_ESCAPES, reply),
    )
    app.router.redirect_slashes = False
    return app


def _routes(answers: Completions, status: Status) -> list[Route]:
    return [
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/completions", answers.text, methods=["POST"]),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/health", status.health),
        Route("/ready", status.ready),
        Route("/stats", status.stats),
        Route("/metrics", status.prometheus),
    ]


class CountReplies:
    """Counts replies by path and status; unknown paths are one, or clients could fill memory."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
