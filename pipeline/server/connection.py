"""One TCP or Unix connection: uvicorn's own, with bounds on how many there are, on the time that a request's
head may take and on the time that a reply may lie unread, and with what is not HTTP refused in the API's words."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.server.errors import INVALID, Fault, dump

# in a request's state:
ON_SOCKET = "on_socket"  # it came over the Unix socket
CROWDED = "crowded"  # on one connection too many: nothing is done for it, and the reply ends the connection
HEAD_S = 10.0
PACE = 4096  # bytes that a reader takes at least in the time it has
REFUSALS = 64  # connections too many that are told so; further ones are dropped


class Connection(H11Protocol):
    """Made by uvicorn for each connection."""

    most: (
        int  # open connections; whoever runs the server is let in all the same, by the Unix socket
    )
    unread_s: float  # how long a reader may rest
    _deadline: asyncio.TimerHandle | None = None
    _rest: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A peer's address proves nothing (it is gone once the peer is), the socket's family does."""
        super().connection_made(transport)
        local = transport.get_extra_info("socket").family == socket.AF_UNIX
        over = 0 if local else len(self.connections) - self.most
        if over > REFUSALS:  # each is a file of this process, also while it says nothing
            transport.abort()
            return
        self.app_state = {**self.app_state, ON_SOCKET: local, CROWDED: over > 0}
        transport.set_write_buffer_limits(0)  # whatever the kernel does not take is waited for
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_deadline()
        elif self._deadline is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self._forget_rest()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the client reset: 5 s with all there was

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._forget_rest()
        super().resume_writing()

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

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._rest = self.loop.call_later(self.unread_s, self._look_at_reader, left)

    def _look_at_reader(self, left: int) -> None:
        """For whoever answers it, a reader that rests is a client that has gone."""
        if self.transport.get_write_buffer_size() > left - PACE:
            self.transport.abort()
        else:
            self._await_reader()

    def _forget_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
