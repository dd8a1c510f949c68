"""A client of a server on this machine."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

from pipeline.types.places import user_path

PATIENCE_S = 600.0


class SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str | Path, timeout: float = PATIENCE_S):
        super().__init__("localhost", timeout=timeout)
        self._path = user_path(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def admin_connection(host: str, port: int, path: str | None) -> http.client.HTTPConnection:
    """To the socket where there is one: nobody needs a key there."""
    if path is not None:
        return SocketConnection(path)
    return http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
