"""The `server` group: where to listen and what to allow."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pipeline.server.keys import Keyring
    from pipeline.server.store import ResponseStore

TWO_BODIES = "must be at least twice max_body_bytes: a key may have half of it"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+|null")


def is_loopback(host: str) -> bool:
    """Whether only this machine gets there."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServerSettings:
    """Settings of the HTTP server. The constructor is the schema of `conf/server/*.yaml`."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,  # 0: any free port
        socket: str | None = None,  # path of a Unix socket, beside the port
        keys: str | None = None,  # file of API keys, or env:VARIABLE
        hosts: list[str] | None = None,  # names it is asked by, beside this machine's own
        cors: list[str] | None = None,  # origins of web pages that may ask
        max_connections: int = 512,  # open ones; each is a file of the process
        max_header_bytes: int = 16 << 10,  # address and headers of a request
        max_body_bytes: int = 8 << 20,
        bodies_bytes: int = 64 << 20,  # room for the bodies of all requests under way
        body_s: float = 60.0,  # how long a request's body may take to arrive, in seconds
        unread_s: float = 60.0,  # how long a client may leave its reply unread, in seconds
        max_choices: int = 64,  # prompts x n in one HTTP request
        keepalive_s: float = 2.0,  # longest silence of a stream, in seconds
        shutdown_s: float = 30.0,  # how long running answers may go on after SIGTERM
        close_s: float = 90.0,  # how long it may then take to write saved states, before the process ends anyway
        log: str | None = None,  # file of JSON lines; None: standard error
        log_prompts: bool = False,
        responses_ttl_s: float = 3600.0,  # how long an answer can be gone on from, in seconds
        responses_bytes: int = 32 << 20,  # room for such answers, as JSON
        responses_folder: str | None = None,  # where they outlive the process; None: in memory
        isolate: bool = False,  # the engine in a process of its own
        restarts: int = 5,  # of that process in a row, until it is given up
        hang_s: float = 300.0,  # without a sign of life it is killed, and started again
    ):
        self.host, self.port = host, port
        self.socket, self.keys = socket, keys
        self.hosts, self.cors = tuple(hosts or ()), tuple(cors or ())
        self.max_connections, self.max_choices = max_connections, max_choices
        self.max_header_bytes, self.max_body_bytes = max_header_bytes, max_body_bytes
        self.bodies_bytes, self.body_s, self.unread_s = bodies_bytes, body_s, unread_s
        self.keepalive_s, self.shutdown_s, self.close_s = keepalive_s, shutdown_s, close_s
        self.log, self.log_prompts = log, log_prompts
        self.responses_ttl_s, self.responses_bytes = responses_ttl_s, responses_bytes
        self.responses_folder = responses_folder
        self.isolate, self.restarts, self.hang_s = isolate, restarts, hang_s
        if problems := [*self._out_of_range(), *self._unsafe()]:
            raise ConfigError(problems)

    @cached_property
    def keyring(self) -> Keyring | None:
        """The keys, read once; ConfigError lists what is wrong with them. None: nobody needs one."""
        from pipeline.server.keys import read_keys

        return None if self.keys is None else read_keys(self.keys)

    def read_files(self) -> None:
        """ConfigError for what is wrong with a file: to be had before a model is loaded."""
        _ = self.keyring

    def try_listening(self) -> None:
        """OpenError if somebody has the port or the socket already: likewise."""
        from pipeline.server.listening import refuse_taken

        refuse_taken(self.host, self.port, self.socket)

    def store(self) -> ResponseStore:
        """A new store of answers, as the settings say."""
        from pipeline.server.store import ResponseStore

        ttl_s, folder = self.responses_ttl_s, self.responses_folder
        try:
            return ResponseStore(ttl_s=ttl_s, max_bytes=self.responses_bytes, folder=folder)
        except OSError as error:
            problem = Problem("server.responses_folder", f"cannot be used: {error}")
            raise ConfigError([problem]) from error

    def _unsafe(self) -> Iterator[Problem]:
        if not is_loopback(self.host) and self.keys is None:
            what = f"{self.host!r} lets other machines in, and nobody needs a key."
            hint = "Make one (headrace key NAME), put it into a file, and add server.keys=FILE"
            yield Problem("server.host", what, hint)
        if "*" in self.cors and self.keys is None:
            what = "'*' lets every web page ask, and nobody needs a key."
            yield Problem("server.cors", what, "Name the pages, or add server.keys=FILE")
        for origin in self.cors:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                what = f"{origin!r} is no origin."
                yield Problem("server.cors", what, "Write https://app.example.org, without a path")

    def _out_of_range(self) -> list[Problem]:
        rules = (
            ("port", 0 <= self.port <= 65535, "must lie in 0..65535"),
            ("max_connections", self.max_connections >= 1, "must be at least 1"),
            ("max_header_bytes", self.max_header_bytes >= 1024, "must be at least 1024 bytes"),
            ("body_s", self.body_s > 0, "must be more than 0 seconds"),
            ("unread_s", self.unread_s > 0, "must be more than 0 seconds"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "must be at least 1024 bytes"),
            ("bodies_bytes", self.bodies_bytes >= 2 * self.max_body_bytes, TWO_BODIES),
            ("max_choices", self.max_choices >= 1, "must be at least 1"),
            ("keepalive_s", self.keepalive_s > 0, "must be more than 0 seconds"),
            ("responses_ttl_s", self.responses_ttl_s > 0, "must be more than 0 seconds"),
            ("responses_bytes", self.responses_bytes >= 0, "must not be negative"),
            ("restarts", self.restarts >= 0, "must not be negative"),
            ("hang_s", self.hang_s >= 2, "must be at least 2 seconds"),
            ("close_s", self.close_s > 0, "must be more than 0 seconds"),
            ("shutdown_s", self.shutdown_s >= 0, "must not be negative"),
        )
        return [
            Problem(f"server.{name}", f"{getattr(self, name)!r} {rule}")
            for name, ok, rule in rules
            if not ok
        ]
