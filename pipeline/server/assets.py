"""The page at `/`: static files that hold no data and need nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again after an update, by its ETag
}


class Assets(StaticFiles):
    """The folder `page`, each file under the policy above."""

    def __init__(self) -> None:
        super().__init__(directory=Path(__file__).with_name("page"))

    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers.update(HEADERS)
        return response

    async def index(self, request: Request) -> Response:
        return await self.get_response("index.html", request.scope)
