"""Room for request bodies: what all of them together may take, and how much of that is one key's."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.errors import BusyError


class Bodies:
    """ASGI middleware behind the gate. What a request has sent counts until it is answered, since until then
    there is something of it in memory. A key may fill half the room, so that none keeps the others out."""

    def __init__(self, app: ASGIApp, room: int):
        self._app, self._room = app, room
        self._taken: Counter[str] = Counter()  # bytes, by the name of the key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, taken = scope["state"]["caller"].name, 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            size = len(message.get("body", b""))
            self._take(name, size)
            taken += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._taken[name] -= taken

    def _take(self, name: str, size: int) -> None:
        own = self._room // 2 if name else self._room
        if self._taken[name] + size > own or self._taken.total() + size > self._room:
            message = "The bodies of the requests under way fill their room (server.bodies_bytes)."
            raise BusyError(message, code="bodies_limit_exceeded")
        self._taken[name] += size
