"""What a family of endpoints must be able to do: read its requests, and write answers in its words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from pipeline.server.answer import Answer
from pipeline.server.asked import Asked, Bounds
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import Fault, dump
from pipeline.server.voices import News, Voice
from pipeline.types import Done


class Writer(Protocol):
    """One answer's objects. Methods that return frames are called in the order of their events."""

    @property
    def voices(self) -> Sequence[Voice]: ...

    def opening(self) -> Iterable[bytes]:
        """A stream's first frames, before any token."""
        ...

    def news(self, index: int, news: News) -> Iterable[bytes]: ...
    def ended(self, index: int, done: Done) -> Iterable[bytes]: ...
    async def closing(self) -> Iterable[bytes]:
        """All choices are complete; what is to be stored of them is."""
        ...

    def failed(self, fault: Fault) -> Iterable[bytes]:
        """The stream ends here, and says so."""
        ...

    async def whole(self) -> dict[str, Any]:
        """The complete object, once every choice has ended; what is to be stored of it is."""
        ...


class Family(Protocol):
    """One endpoint's requests and replies."""

    def read(self, value: Mapping[str, Any], bounds: Bounds) -> Asked:
        """RequestError for anything that is wrong or cannot be done."""
        ...

    async def writer(self, answer: Answer, engine: ServedEngine) -> Writer:
        """Called once every choice is admitted."""
        ...


def frame(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode("ascii") + b"\n"
    return head + b"data: " + dump(data) + b"\n\n"
