"""The `server` group: where to listen and what to allow."""

from __future__ import annotations

from pipeline.errors import ConfigError, Problem


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
    ):
        self.host, self.port = host, port
        self.max_body_bytes, self.max_choices = max_body_bytes, max_choices
        self.keepalive_s, self.shutdown_s = keepalive_s, shutdown_s
        if problems := self._problems():
            raise ConfigError(problems)

    def _problems(self) -> list[Problem]:
        rules = (
            ("port", 0 <= self.port <= 65535, "must lie in 0..65535"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "must be at least 1024 bytes"),
            ("max_choices", self.max_choices >= 1, "must be at least 1"),
            ("keepalive_s", self.keepalive_s > 0, "must be more than 0 seconds"),
            ("shutdown_s", self.shutdown_s >= 0, "must not be negative"),
        )
        return [
            Problem(f"server.{name}", f"{getattr(self, name)!r} {rule}")
            for name, ok, rule in rules
            if not ok
        ]
