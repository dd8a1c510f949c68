"""What crosses between the server's process and the engine's: JSON, one message a line.

Each message is a dataclass below, made of what `pipeline.types` says of requests and events; pydantic
writes it and checks it on arrival. Nothing that arrives is ever run.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.isolate.faults import Fault
from pipeline.types import Accepted, Delta, Done, Request

BATCH = 64 << 10  # bytes of messages joined into one write


@dataclass(frozen=True)
class Submit:
    id: int
    request: Request
    kind: Literal["submit"] = "submit"


@dataclass(frozen=True)
class Cancel:
    id: int
    kind: Literal["cancel"] = "cancel"


@dataclass(frozen=True)
class Call:
    """A question, or work that is no request, by its name in `calls`."""

    id: int
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["call"] = "call"


@dataclass(frozen=True)
class Close:
    """End what runs, write what is to survive, and end."""

    kind: Literal["close"] = "close"


@dataclass(frozen=True)
class Text:
    """What the server's process has to know of the tokenizer and its dialect without asking."""

    template: str | None
    identity: str
    special_ids: frozenset[int]
    dialect: Mapping[str, Any]
    vocabulary: tuple[str, ...]  # bytes of each token, a letter of Latin-1 a byte


@dataclass(frozen=True)
class Opened:
    """The engine takes requests. `settings` are the groups that the server itself uses."""

    info: Mapping[str, Any]
    device: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    text: Text
    resumable: bool
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True)
class Refused:
    """The engine could not be made or opened."""

    fault: Fault
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True)
class Told:
    """An event of a request; a `Fault` stands for `Failed`."""

    id: int
    event: Accepted | Delta | Done | Fault
    kind: Literal["told"] = "told"


@dataclass(frozen=True)
class Beat:
    """It lives, and gets on."""

    kind: Literal["beat"] = "beat"


@dataclass(frozen=True)
class Reply:
    """To the call of that number."""

    id: int
    value: Any = None
    fault: Fault | None = None
    kind: Literal["reply"] = "reply"


Order = Submit | Cancel | Call | Close | Told | Reply  # the last two in place of what has no JSON
News = Opened | Refused | Told | Beat | Reply


def in_place_of(kind: str, id: int, error: Exception) -> Told | Reply:
    """Instead of what cannot be written or read: it is that one request's fault, or that one call's."""
    fault = Fault.of(error)
    return Told(id, fault) if kind in (Told.kind, Submit.kind) else Reply(id, fault=fault)


class Line:
    """One end of the connection. `say` never waits, however large the message: a thread makes JSON of it and writes. Of
    what has none (what a client has sent may be so) the error goes `in_place_of` the message. `heard` ends when the
    other side does."""

    def __init__(self, end: socket.socket, reads: Any):
        config = ConfigDict(ser_json_inf_nan="constants")  # a log-probability may be minus infinity
        messages: Any = Annotated[Order | News, Field(discriminator="kind")]
        self._writes: TypeAdapter[Any] = TypeAdapter(messages, config=config)
        self._reads: TypeAdapter[Any] = TypeAdapter(Annotated[reads, Field(discriminator="kind")])
        self._end, self._file = end, end.makefile("rb")
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="headrace-line", daemon=True)
        self._writer.start()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self._waiting.put(message)

    def said(self, message: Any) -> bytes:
        """As it is written. ValueError for what has no JSON: half a surrogate, say."""
        return self._writes.dump_json(message, warnings=False) + b"\n"

    def heard(self) -> Iterator[Any]:
        try:
            for line in self._file:
                yield self._read(line)
        except OSError:  # reset: it is gone, as at the end
            return

    def _read(self, line: bytes) -> Any:
        try:
            return self._reads.validate_json(line)
        except ValidationError as error:
            found = json.loads(line)
            return in_place_of(found["kind"], found["id"], error)

    def close(self) -> None:
        """What has been said leaves first."""
        self._waiting.put(None)
        self._writer.join()
        self._file.close()
        self._end.close()

    def _write(self) -> None:
        more = True
        while more:
            batch, more = self._batch()
            try:
                self._end.sendall(batch)
            except OSError:
                return  # nobody reads any more

    def _batch(self) -> tuple[bytearray, bool]:
        """What waits, up to a full one; whether more may come."""
        batch = bytearray()
        while (message := self._waiting.get()) is not None:
            batch += self._said(message)
            if len(batch) >= BATCH or self._waiting.empty():
                return batch, True
        return batch, False

    def _said(self, message: Any) -> bytes:
        try:
            return message if isinstance(message, bytes) else self.said(message)
        except Exception as error:  # whatever a value that is no plain data may do
            return self.said(in_place_of(message.kind, message.id, error))
