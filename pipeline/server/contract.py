"""What the server needs of an engine; `pipeline.engine.Engine` has this shape, so has a fake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pipeline.types import Event, Request, Tokenizer


class Ticket(Protocol):
    """One submitted request. `cancel` is thread-safe, returns at once and may be called twice."""

    def cancel(self) -> None: ...


class Adapters(Protocol):
    """What is mounted on the model; `mount_shelved` and `unmount` block until no row is in use."""

    def listed(self) -> list[dict[str, Any]]: ...
    def mount_shelved(self, name: str, folder: str, scale: float) -> dict[str, Any]:
        """RequestError with everything that is wrong, of the name of a folder that is none, too."""
        ...

    def unmount(self, name: str) -> None:
        """RequestError, 404 for an unknown id."""
        ...


class Leases(Protocol):
    """See `pipeline.leases`."""

    def take(self, name: str) -> None: ...
    def state(self, name: str) -> str: ...
    def release(self, name: str) -> None: ...


class ServedEngine(Protocol):
    """Everything is safe on any thread; all but `flush`, `drain` and `close` return at once; `stats` and
    `health` give plain data.

    `health()["status"]` is "ok" while the engine thread lives; `health()["state"]` is "open" while it
    takes requests.
    `target_info` has at least name, context_len, vocab_size, eos_ids, max_open (requests), priorities
    (whether one changes anything) and adapters (ids of those that are mounted).
    """

    @property
    def adapters(self) -> Adapters: ...
    @property
    def target_info(self) -> Mapping[str, Any]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def leases(self) -> Leases: ...

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Ticket:
        """BusyError if the queue is full, ClosedError if stopped; the rest arrives as events."""
        ...

    def stats(self) -> Mapping[str, Any]: ...
    def health(self) -> Mapping[str, Any]: ...
    def describe(self) -> Mapping[str, Any]:
        """What is served: `recipe`, `graph`, `choices` and `settings`, JSON-ready."""
        ...

    def flush(self) -> Mapping[str, Any]:
        """Write saved state to disk; `durable` says whether all of it is there."""
        ...

    def close_session(self, session_id: str) -> None:
        """Drop its affinity; any name will do."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; True if all ended in time."""
        ...

    def close(self) -> None:
        """End open requests with ClosedError; may be called twice."""
        ...
