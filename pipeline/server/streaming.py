"""Server-sent events: headers at admission, one event a chunk, a comment when it is silent.

A stream has its family's last event only if every choice is complete. A failure on the way is one event
that says so, in the family's words, and nothing follows it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import groupby

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pipeline.errors import HeadraceError
from pipeline.server.answer import Answer
from pipeline.server.channel import Stamped
from pipeline.server.errors import ClientGone, describe
from pipeline.server.writer import Writer
from pipeline.types import Delta, Done

log = logging.getLogger("headrace.server")

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Owns the answer from its admission on and closes it when the last byte is out."""

    media_type = "text/event-stream"

    def __init__(
        self, answer: Answer, writer: Writer, headers: Mapping[str, str], keepalive_s: float
    ):
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._answer, self._writer, self._keepalive_s = answer, writer, keepalive_s
        self._sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._open(send)
            await self._events(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            pass  # nobody reads
        finally:
            self._answer.close()

    async def _open(self, send: Send) -> None:
        self._sent = time.monotonic()
        await self._say(send, self._writer.opening())

    async def _events(self, send: Send) -> None:
        try:
            while not self._answer.finished:
                await self._step(send)
            await self._say(send, await self._writer.closing())
        except (ClientGone, OSError):
            raise
        except Exception as error:
            self._answer.error = error
            if not isinstance(error, HeadraceError):
                log.error("%s failed in mid-stream", self._answer.asked.id, exc_info=error)
            await self._say(send, self._writer.failed(describe(error)))

    async def _step(self, send: Send) -> None:
        """Wait for news, at most until a sign of life is due."""
        due = self._sent + self._keepalive_s
        items = await self._answer.events(max(0.0, due - time.monotonic()))
        await self._say(send, [frame async for frame in self._frames(items)])
        if time.monotonic() >= due and self._sent + self._keepalive_s <= due:
            await self._write(send, b": keep-alive\n\n")

    async def _frames(self, items: Sequence[Stamped]) -> AsyncIterator[bytes]:
        for index, group in groupby(items, key=lambda item: item.index):
            voice = self._writer.voices[index]
            events = [item.event for item in group]
            deltas = [news for news in events if isinstance(news, Delta)]
            if deltas:
                for frame in self._writer.news(index, await voice.hear(deltas)):
                    yield frame
            for done in (news for news in events if isinstance(news, Done)):
                for frame in self._writer.news(index, await voice.end(done)):
                    yield frame
                for frame in self._writer.ended(index, done):
                    yield frame

    async def _say(self, send: Send, frames: Iterable[bytes]) -> None:
        if data := b"".join(frames):
            await self._write(send, data)

    async def _write(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent = time.monotonic()
