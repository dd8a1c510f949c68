"""Every error reply, in plain-ASCII JSON: OpenAI's `{"error": {message, type, param, code}}`, and for
/v1/messages Anthropic's `{"type": "error", "error": {type, message}}`.

400 the request is wrong · 401 the key is · 403 it may not · 404/405 the address is wrong · 408 the body came
too slowly · 413 it is too large · 429 too much at once (Retry-After) · 431 the headers are too large · 499 the
client left (nobody reads it) · 500 our fault · 503 no engine.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pipeline.errors import BusyError, ClosedError, HeadraceError, RequestError

log = logging.getLogger("headrace.server")

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


ERROR = "error"  # in a request's state: what its reply tells of
INVALID = "invalid_request_error"
ANTHROPIC = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
)
NOWHERE = MappingProxyType(
    {
        404: (
            "not_found",
            "No such address. The base URL of OpenAI's clients ends in /v1, that of Anthropic's does not; "
            "GET /openapi.json lists every address.",
        ),
        405: ("method_not_allowed", "This address takes other methods: `Allow` names them."),
    }
)


class ClientGone(Exception):
    """The client closed its connection; no reply can reach it."""


@dataclass(frozen=True)
class Fault:
    """An error as HTTP says it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        named = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": named}

    def anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else INVALID)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def told_at(self, path: str) -> dict[str, Any]:
        """In the words of the family that is asked there."""
        return self.anthropic() if path.startswith("/v1/messages") else self.body()


class JSON(Response):
    """ASCII-only JSON: no lone surrogate or line separator of a value can break the bytes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def dump(content: Any) -> bytes:
    """Compact ASCII JSON. ValueError for NaN, which no reply may hold."""
    return _encode(content).encode("ascii")


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> RequestError:
    """A 400 naming the field. `message` must not repeat what the client sent."""
    return RequestError(message, param=param, code=code)


def describe(error: BaseException) -> Fault:
    """The reply for an exception. Messages of faults of our own stay in the log."""
    match error:
        case RequestError(status=status, param=param, code=code):
            headers = {"www-authenticate": "Bearer"} if status == 401 else {}
            return Fault(status, str(error), INVALID, param, code, headers)
        case BusyError(retry_after_s=wait, code=code):
            headers = {"retry-after": str(max(1, math.ceil(wait)))}
            return Fault(429, str(error), "rate_limit_error", None, code, headers)
        case ClosedError(retry_after_s=wait):
            headers = {"retry-after": str(max(1, math.ceil(wait)))}
            return Fault(503, str(error), "server_error", None, "engine_closed", headers)
        case HTTPException():
            return _http_fault(error)
        case _:
            message = "The server failed to answer; its log says why."
            return Fault(500, message, "server_error", None, "internal_error")


def _http_fault(error: HTTPException) -> Fault:
    headers = dict(error.headers or {})
    code, message = NOWHERE.get(error.status_code, (None, error.detail))
    return Fault(error.status_code, message, INVALID, None, code, headers)


async def reply(request: Request, error: Exception) -> Response:
    """The response for what escapes an endpoint or the router."""
    request.scope["state"][ERROR] = error
    if isinstance(error, (ClientGone, ClientDisconnect)):
        return Response(status_code=499)
    fault = describe(error)
    if not isinstance(error, (HeadraceError, HTTPException)):
        log.error("%s %s failed", request.method, ascii(request.url.path), exc_info=error)
    return JSON(fault.told_at(request.url.path), fault.status, dict(fault.headers))
