"""Around everything: each request gets an id, a count, a line in the log, and a reply in the envelope if an
endpoint has none."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from pipeline.server import journal
from pipeline.server.connection import CROWDED
from pipeline.server.endpoint import ANSWER, WRITER
from pipeline.server.errors import ERROR, ClientGone, describe, reply
from pipeline.server.metrics import Metrics

GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # an id that a client may give its request
IDS = (b"x-request-id", b"request-id")  # OpenAI's name and Anthropic's
SHOWN = 200  # letters of an address in the log


@dataclass
class Visit:
    """One request, from its first byte to its last."""

    scope: Scope
    began: float = field(default_factory=time.perf_counter)
    status: int = 0  # 0: no reply has begun

    @property
    def id(self) -> str:
        """The client's own word for it, the answer's id, or a new one."""
        given = Headers(scope=self.scope).get("x-request-id", "")
        if GIVEN.fullmatch(given):
            return given
        answer = self.scope.get(ANSWER)
        made: str = self.scope["state"].setdefault("id", f"req_{uuid4().hex}")
        return answer.asked.id if answer else made

    @property
    def error(self) -> Exception | None:
        """What its reply tells of, or what its stream ended with."""
        answer = self.scope.get(ANSWER)
        found: Exception | None = self.scope["state"].get(ERROR) or (answer and answer.error)
        return found

    def fields(self, *, prompts: bool) -> dict[str, Any]:
        """Its line in the log."""
        caller = self.scope["state"].get("caller")
        said: dict[str, Any] = {
            "event": "request",
            "id": self.id,
            "key": caller.name if caller else "",
            "method": self.scope["method"],
            "route": self.scope["path"][:SHOWN],
            "status": self.status,
            "seconds": round(time.perf_counter() - self.began, 4),
        }
        if answer := self.scope.get(ANSWER):
            writer = self.scope.get(WRITER)
            voices = list(writer.voices) if writer else []
            said |= journal.books(answer, voices, prompts=prompts)
        if self.error is not None and not isinstance(self.error, ClientGone):
            fault = describe(self.error)
            said |= {"error": fault.code or fault.type, "message": fault.message}
        return said


class Front:
    """ASGI middleware. Unknown paths are counted as one, or clients could fill the memory."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str], prompts: bool):
        self._app, self._metrics, self._paths, self._prompts = app, metrics, paths, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = Visit(scope)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(visit, message["status"])
                named = [(name, visit.id.encode()) for name in IDS]
                if scope["state"].get(CROWDED):
                    named.append(CLOSE_HEADER)
                message = {**message, "headers": [*message.get("headers", ()), *named]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if visit.status:
                raise
            response = await reply(Request(scope), error)
            await response(scope, receive, noted)
        finally:
            if journal.wanted():
                journal.write(visit.fields(prompts=self._prompts))
            if (told := visit.error) is not None:  # its frames hold the request, and so itself
                told.__traceback__ = None

    def _count(self, visit: Visit, status: int) -> None:
        visit.status = status
        path = visit.scope["path"] if visit.scope["path"] in self._paths else "other"
        self._metrics.requests.labels(path, str(status)).inc()
