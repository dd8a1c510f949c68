"""Who asks: the owner of a key, the operator at the Unix socket, or, without keys, anybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from pipeline.errors import RequestError
from pipeline.server.errors import invalid


@dataclass(frozen=True)
class Caller:
    """What one request may do, and under which name. Answers and sessions belong to `name`."""

    name: str = ""  # of the key; empty: no key
    address: str = ""
    known: bool = True  # may use the API; who is not, is told whether the server lives
    admin: bool = False
    priority: int | None = (
        None  # what its requests have, and the most they may; None: what they say
    )
    weight: float = 1.0  # its share of the server, beside others of 1

    @property
    def operator(self) -> bool:
        """May see where things lie on this machine: settings and files. Without keys, everybody."""
        return self.known and (self.admin or not self.name)

    def asks(self, user: str | None, priority: int | None, session: str | None) -> dict[str, Any]:
        """Fields of an engine request. A key's name stands for all its users: who may invent users must not
        get a share for each."""
        if self.priority is not None:
            priority = self._allowed(priority, self.priority)
        return {
            "client": self.name or user or self.address,
            "weight": self.weight,
            "priority": priority or 0,
            "session_id": None if session is None else self.session(session),
        }

    def session(self, name: str) -> str:
        """Nobody else's, whatever it is called."""
        return f"{self.name}/{name}" if self.name else name

    def _allowed(self, wanted: int | None, most: int) -> int:
        if wanted is not None and wanted > most:
            raise invalid(f"priority: this key's requests may have {most} at most.", "priority")
        return most if wanted is None else wanted


def caller(request: Request) -> Caller:
    """As the gate has found."""
    found = request.state.caller
    assert isinstance(found, Caller)
    return found


def shown_device(device: Mapping[str, Any], viewer: Caller) -> dict[str, Any]:
    """Without what names files of this machine, but for the operator."""
    return {k: v for k, v in device.items() if viewer.operator or not k.endswith("_path")}


def admin_only(request: Request) -> None:
    """RequestError 403 for everybody else."""
    if not caller(request).admin:
        message = (
            "Only on the Unix socket (server.socket=PATH), or with a key that has `admin: true`."
        )
        raise RequestError(message, code="forbidden", status=403)
