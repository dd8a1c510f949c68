"""A server that answers until it has drained: uvicorn's own shutdown closes the listener at once and
cancels what still runs, which cuts streams and logs tracebacks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from pipeline.server.contract import ServedEngine
from pipeline.server.settings import ServerSettings

FLUSH_S = 3  # how long clients have to take last events once the engine is closed
HURRY_S = 2.0  # how long an orderly end may take after a second signal
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.02

log = logging.getLogger("headrace.server")


class SignalledServer(uvicorn.Server):
    """Uvicorn raises the caught signal again on its way out; that would skip closing the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)


class DrainingServer(SignalledServer):
    """Told to exit, it first drains and closes the engine while it still answers: new requests and
    /ready get 503, and what outlives `shutdown_s` ends with the engine's own error.

    It ends by a time that can be known: a thread that only waits ends the process (exit code 1) `close_s` after
    that, and HURRY_S after a second signal (128 + its number), whatever hangs then. What was being
    written is a miss for the next start, never a wrong answer.
    """

    def __init__(self, config: uvicorn.Config, engine: ServedEngine, settings: ServerSettings):
        super().__init__(config)
        self._engine, self._shutdown_s, self._close_s = (
            engine,
            settings.shutdown_s,
            settings.close_s,
        )
        self._ends: list[threading.Timer] = []
        self.code = 0  # what the process should end with

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second signal cuts the first one's patience short."""
        if not self.should_exit:
            self.should_exit = True
            self._end_within(self._shutdown_s + self._close_s, 1)
        elif not self.force_exit:
            self.force_exit, self.code = True, 128 + sig
            self._end_within(HURRY_S, self.code)

    def ended(self) -> int:
        """Everything is closed: nothing is to be cut short any more. The process's exit code."""
        for timer in self._ends:
            timer.cancel()
        return self.code

    async def main_loop(self) -> None:
        await super().main_loop()
        log.info(
            "ending: running answers have %g s; a second signal ends them now", self._shutdown_s
        )
        until = time.monotonic() + self._shutdown_s
        await self._drain()
        await asyncio.to_thread(self._engine.close)
        grace = time.monotonic() + FLUSH_S
        await self._flush(grace if self.force_exit else max(until, grace))

    def _end_within(self, seconds: float, code: int) -> None:
        timer = threading.Timer(seconds, _end, (seconds, code))
        timer.daemon = True
        timer.start()
        self._ends.append(timer)

    async def _drain(self) -> None:
        """A second signal cuts it short: closing the engine then ends the wait in the thread."""
        drained = asyncio.create_task(asyncio.to_thread(self._engine.drain, self._shutdown_s))
        while not (drained.done() or self.force_exit):
            await asyncio.sleep(_POLL_S)

    async def _flush(self, until: float) -> None:
        """Let replies leave; who does not read them by `until` loses the connection."""
        if await self._finished(until):
            return
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._finished(time.monotonic() + FLUSH_S)

    async def _finished(self, until: float) -> bool:
        while self.server_state.tasks and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        return not self.server_state.tasks


def _end(seconds: float, code: int) -> None:
    log.error("not closed within %g s: the process ends all the same", seconds)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
