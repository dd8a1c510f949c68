"""POST /v1/chat/completions and /v1/completions: one path from body to reply for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pipeline.server import asked as read
from pipeline.server.answer import Answer
from pipeline.server.asked import Asked, Bounds
from pipeline.server.body import read_object
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import JSON
from pipeline.server.metrics import Metrics
from pipeline.server.neutral import warning
from pipeline.server.replies import Scribe
from pipeline.server.settings import ServerSettings
from pipeline.server.shapes import ChatShape, Shape, TextShape
from pipeline.server.streaming import EventStream
from pipeline.types import Delta

Reader = Callable[[Mapping[str, Any], Bounds], Asked]


@dataclass(frozen=True)
class Completions:
    """Both endpoints over one engine."""

    engine: ServedEngine
    settings: ServerSettings
    metrics: Metrics

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, read.chat, ChatShape())

    async def text(self, request: Request) -> Response:
        return await self._respond(request, read.text, TextShape())

    async def _respond(self, request: Request, reader: Reader, shape: Shape) -> Response:
        body = await read_object(request, self.settings.max_body_bytes)
        asked = reader(body, self._bounds(request))
        answer = Answer(self.engine, asked, self.metrics)
        try:
            await answer.open(request.receive)
            scribe = Scribe(shape, answer, self.engine)
            if asked.stream:
                return self._stream(answer, scribe)
            reply = await self._whole(answer, scribe)
        except BaseException:
            answer.close()
            raise
        answer.close()
        return reply

    def _bounds(self, request: Request) -> Bounds:
        client = request.client.host if request.client else ""
        info = self.engine.target_info
        most = self.settings.max_choices
        return Bounds(info["vocab_size"], most, info["max_open"], client, info["priorities"])

    def _stream(self, answer: Answer, scribe: Scribe) -> Response:
        return EventStream(answer, scribe, _headers(answer.asked), self.settings.keepalive_s)

    async def _whole(self, answer: Answer, scribe: Scribe) -> Response:
        deltas: list[list[Delta]] = [[] for _ in answer.choices]
        while not answer.finished:
            for item in await answer.events():
                if isinstance(item.event, Delta):
                    deltas[item.index].append(item.event)
        return JSON(scribe.whole(deltas), headers=_headers(answer.asked))


def _headers(asked: Asked) -> dict[str, str]:
    return {"x-request-id": asked.id, **warning(asked.ignored)}
