"""The way in: the size of a request's head, the page it comes from, whose key it has, and how much that may
ask for. Everything behind it knows who asks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.errors import BusyError, RequestError
from pipeline.server.caller import Caller
from pipeline.server.connection import CROWDED, ON_SOCKET
from pipeline.server.keys import presented
from pipeline.server.origins import Origins
from pipeline.server.quota import Quota
from pipeline.server.settings import ServerSettings

OPEN = frozenset({"/", "/health", "/ready"})  # no key is asked for
FILES = "/page/"  # nor for the page's files: they hold no data


class Gate:
    """ASGI middleware. What it raises is a reply. POSTs to the paths in `counted` are work for the engine: they use
    up what a key may ask."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, counted: Collection[str]):
        self._app, self._most_bytes = app, settings.max_header_bytes
        self._counted = counted
        self._origins = Origins(settings.host, settings.hosts, settings.cors)
        self._keyring = settings.keyring
        keys = self._keyring.keys if self._keyring else {}
        self._quotas = {name: Quota(key) for name, key in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_size(scope)
        if not scope["state"].get(ON_SOCKET):
            self._origins.check(Headers(scope=scope))
        caller = scope["state"]["caller"] = self._caller(scope)
        if scope["state"].get(CROWDED) and scope["path"] not in OPEN:
            message = "The server has as many open connections as it may (server.max_connections)."
            raise BusyError(message, code="too_many_connections")
        counted = caller.name and scope["method"] == "POST" and scope["path"] in self._counted
        quota = self._quotas[caller.name].request() if counted else contextlib.nullcontext()
        with quota:
            await self._app(scope, receive, send)

    def _check_size(self, scope: Scope) -> None:
        head = [
            scope["raw_path"],
            scope["query_string"],
            *(b for pair in scope["headers"] for b in pair),
        ]
        if sum(map(len, head)) > self._most_bytes:
            message = f"Address and headers are larger than {self._most_bytes} bytes."
            raise RequestError(message, code="headers_too_large", status=431)

    def _caller(self, scope: Scope) -> Caller:
        address = scope["client"][0] if scope["client"] else ""
        nameless = Caller(address=address, admin=bool(scope["state"].get(ON_SOCKET)))
        secrets = presented(scope["headers"])
        if self._keyring is None or (nameless.admin and not secrets):
            return nameless
        name = self._keyring.find(*secrets) if len(secrets) == 1 else None
        if name is not None:
            key = self._keyring.keys[name]
            return Caller(name, address, True, key.admin, key.priority, key.weight)
        if scope["path"] in OPEN or scope["path"].startswith(FILES):
            return Caller(address=address, known=False)
        raise _refusal(len(secrets))


def _refusal(keys: int) -> RequestError:
    if keys == 0:
        what = "An API key is missing: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    elif keys == 1:
        what = "This API key is not known here."
    else:
        what = "There are several API keys in this request: send one."
    return RequestError(what, code="invalid_api_key", status=401)
