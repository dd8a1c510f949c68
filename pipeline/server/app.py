"""The Starlette app over one engine. All state lives in the objects made here."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.server.completions import Completions
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import reply
from pipeline.server.metrics import Metrics
from pipeline.server.settings import ServerSettings
from pipeline.server.status import Status


def create_app(engine: ServedEngine, settings: ServerSettings) -> Starlette:
    """The whole HTTP surface of an open engine; starts and stops nothing."""
    metrics = Metrics(engine)
    routes = _routes(Completions(engine, settings, metrics), Status(engine, metrics))
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Front, metrics=metrics, paths={r.path for r in routes})],
        exception_handlers={HTTPException: reply},
    )
    app.router.redirect_slashes = False
    return app


def _routes(answers: Completions, status: Status) -> list[Route]:
    return [
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/completions", answers.text, methods=["POST"]),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/v1/sessions/{name:path}", status.close_session, methods=["DELETE"]),
        Route("/health", status.health),
        Route("/ready", status.ready),
        Route("/stats", status.stats),
        Route("/metrics", status.prometheus),
        Route("/admin/cache/flush", status.flush, methods=["POST"]),
    ]


class Front:
    """Counts replies by path and status, and answers what escaped an endpoint in the envelope.

    Unknown paths are counted as one, or clients could fill the memory.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if started:
                raise
            response = await reply(Request(scope), error)
            await response(scope, receive, counted)
