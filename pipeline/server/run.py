"""Running the app: `headrace serve`, and a server in a thread for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pipeline.server.app import create_app
from pipeline.server.connection import Connection
from pipeline.server.contract import ServedEngine
from pipeline.server.drain import FLUSH_S, DrainingServer, SignalledServer
from pipeline.server.listening import allow_files, listening, url
from pipeline.server.settings import ServerSettings
from pipeline.server.spans.provider import Tracing

_START_S = 10.0


def run_server(
    engine: ServedEngine,
    settings: ServerSettings,
    announce: Callable[[str], Any] = print,
    tracing: Tracing | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then: refuse new requests with 503, let running answers finish
    for at most `shutdown_s`, close the engine, which ends the rest with an error and writes what is to be
    saved, and stop listening. A second signal cuts all of that short. The exit code: see `DrainingServer`.

    `announce` gets one line with the address once it is bound. OpenError if the port is taken.
    """
    server: DrainingServer | None = None
    allow_files(settings.max_connections)
    try:
        with listening(settings.host, settings.port, settings.socket) as listeners:
            announce(f"Headrace serves {engine.target_info['name']} at {url(listeners[0])}")
            config = _config(create_app(engine, settings, tracing), settings, FLUSH_S)
            server = DrainingServer(config, engine, settings)
            server.run(sockets=listeners)
    finally:
        engine.close()
        if tracing:
            tracing.close()
        code = server.ended() if server else 0
    return code


@contextlib.contextmanager
def serve_in_thread(
    engine: ServedEngine, settings: ServerSettings, tracing: Tracing | None = None
) -> Iterator[str]:
    """The base URL of a server on a free port of `settings.host`; the engine stays open."""
    with listening(settings.host, 0, settings.socket) as listeners:
        app = create_app(engine, settings, tracing)
        config = _config(app, settings, max(1, round(settings.shutdown_s)))
        server = SignalledServer(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": listeners}, name="headrace-http", daemon=True
        )
        thread.start()
        try:
            _await_start(server, thread)
            yield url(listeners[0])
        finally:
            server.should_exit = True
            thread.join()


def _config(app: ASGIApp, settings: ServerSettings, patience_s: int) -> uvicorn.Config:
    """`patience_s`: how long uvicorn waits for open connections when it exits."""

    class Bounded(Connection):
        most, unread_s = settings.max_connections, settings.unread_s

    return uvicorn.Config(
        app,
        http=Bounded,
        loop="uvloop",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        proxy_headers=False,  # anybody may write those
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=patience_s,
    )


def _await_start(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the HTTP server did not start; the log says why")
        time.sleep(0.002)
