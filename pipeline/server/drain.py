"""A server that answers until it has drained: uvicorn's own shutdown closes the listener at once and
cancels what still runs, which cuts streams and logs tracebacks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import uvicorn

from pipeline.server.contract import ServedEngine

FLUSH_S = 3  # how long clients have to take last events once the engine is closed
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.02


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
    /ready get 503, and what outlives `shutdown_s` ends with the engine's own error."""

    def __init__(self, config: uvicorn.Config, engine: ServedEngine, shutdown_s: float):
        super().__init__(config)
        self._engine, self._shutdown_s = engine, shutdown_s

    async def main_loop(self) -> None:
        await super().main_loop()
        until = time.monotonic() + self._shutdown_s
        await self._drain()
        await asyncio.to_thread(self._engine.close)
        grace = time.monotonic() + FLUSH_S
        await self._flush(grace if self.force_exit else max(until, grace))

    async def _drain(self) -> None:
        """A second SIGINT cuts it short: closing the engine then ends the wait in the thread."""
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
