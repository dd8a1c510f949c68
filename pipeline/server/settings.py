"""The `server` group: where to listen and what to allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pipeline.server.store import ResponseStore


class ServerSettings:
    """Settings of the HTTP server. The constructor is the schema of `conf/server/*.yaml`."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,  # 0: any free port
        max_body_bytes: int = 8 << 20,
        max_choices: int = 64,  # prompts x n in one HTTP request
        keepalive_s: float = 2.0,  # longest silence of a stream, in seconds
        shutdown_s: float = 30.0,  # how long running answers may go on after SIGTERM
        responses_ttl_s: float = 3600.0,  # how long an answer can be gone on from, in seconds
        responses_bytes: int = 32 << 20,  # room for such answers, as JSON
        responses_folder: str | None = None,  # where they outlive the process; None: in memory
    ):
        self.host, self.port = host, port
        self.max_body_bytes, self.max_choices = max_body_bytes, max_choices
        self.keepalive_s, self.shutdown_s = keepalive_s, shutdown_s
        self.responses_ttl_s, self.responses_bytes = responses_ttl_s, responses_bytes
        self.responses_folder = responses_folder
        if problems := self._problems():
            raise ConfigError(problems)

    def store(self) -> ResponseStore:
        """A new store of answers, as the settings say."""
        from pipeline.server.store import ResponseStore

        ttl_s, folder = self.responses_ttl_s, self.responses_folder
        try:
            return ResponseStore(ttl_s=ttl_s, max_bytes=self.responses_bytes, folder=folder)
        except OSError as error:
            problem = Problem("server.responses_folder", f"cannot be used: {error}")
            raise ConfigError([problem]) from error

    def _problems(self) -> list[Problem]:
        rules = (
            ("port", 0 <= self.port <= 65535, "must lie in 0..65535"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "must be at least 1024 bytes"),
            ("max_choices", self.max_choices >= 1, "must be at least 1"),
            ("keepalive_s", self.keepalive_s > 0, "must be more than 0 seconds"),
            ("responses_ttl_s", self.responses_ttl_s > 0, "must be more than 0 seconds"),
            ("responses_bytes", self.responses_bytes >= 0, "must not be negative"),
            ("shutdown_s", self.shutdown_s >= 0, "must not be negative"),
        )
        return [
            Problem(f"server.{name}", f"{getattr(self, name)!r} {rule}")
            for name, ok, rule in rules
            if not ok
        ]
