"""One TCP or Unix connection: uvicorn's own, with a bound on the time that a request's head may take, and
with what is not HTTP refused in the API's words."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.server.errors import INVALID, Fault, dump

ON_SOCKET = "on_socket"  # in a request's state: it came over the Unix socket
HEAD_S = 10.0


class Connection(H11Protocol):
    """Made by uvicorn for each connection."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A peer's address proves nothing (it is gone once the peer is), the socket's family does."""
        super().connection_made(transport)
        family = transport.get_extra_info("socket").family
        self.app_state = {**self.app_state, ON_SOCKET: family == socket.AF_UNIX}
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_deadline()
        elif self._deadline is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """In the middle of an answer there is nothing left to say."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            limit = self.config.h11_max_incomplete_event_size
            what = f"This is not HTTP, or its address and headers are larger than {limit} bytes."
            body = dump(Fault(400, what, INVALID, None, "invalid_http").body())
            headers = [("content-type", "application/json"), ("connection", "close")]
            self._say(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
            self._say(h11.Data(data=body))
            self._say(h11.EndOfMessage())
        self.transport.close()

    def _say(self, event: h11.Event) -> None:
        self.transport.write(self.conn.send(event) or b"")

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
