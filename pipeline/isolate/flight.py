"""A request in flight, which may outlive the process that answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipeline.errors import ClosedError
from pipeline.types import Accepted, Delta, Done, Event, Failed, Origin, Request, TokenLogprob

MOST_GOES = 3  # processes that one request may bring down, or see going down


@dataclass
class Part:
    """A beginning of an answer."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.ids += delta.token_ids
        self.scores += delta.logprobs
        self.origins += delta.origins

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Flight:
    """One request and what its client has had of the answer. Asked again it tells only what is new."""

    request: Request
    deliver: Callable[[Event], None]
    cancelled: bool = False
    goes: int = 1
    accepted: Accepted | None = None
    had: Part = field(default_factory=Part)  # by the client
    again: Part | None = None  # what has come once more of that; None: all, or there was nothing

    def next_go(self) -> None:
        """Before the next process is asked: by the seed that was drawn, so that it is the same answer."""
        self.goes += 1
        self.again = Part() if self.had.ids or self.had.texts else None
        if self.accepted is not None:
            self.request = replace(self.request, drawn_seed=self.accepted.seed)

    def hear(self, event: Event) -> bool:
        """Pass on what is new of it; True if it was the last."""
        match event:
            case Accepted():
                if self.accepted is None:
                    self.accepted = event
                    self._pass(event)
            case Delta():
                return self._delta(event)
            case Done() if self.again is not None:
                return self._differs()
            case _:
                self._pass(event)
        return isinstance(event, Done | Failed)

    def fail(self, error: Exception) -> None:
        self._pass(Failed(error))

    def _delta(self, delta: Delta) -> bool:
        if self.again is not None:
            self.again.add(delta)
            if not self._alike(self.again):
                return self._differs()
            if (fresh := self._caught_up(self.again)) is None:
                return False
            delta, self.again = fresh, None
        self.had.add(delta)
        if delta.text or delta.token_ids:
            self._pass(delta)
        return False

    def _alike(self, again: Part) -> bool:
        """Whether one is the other's beginning."""
        ids, text = (again.ids, self.had.ids), (again.text, self.had.text)
        many, letters = min(map(len, ids)), min(map(len, text))
        return ids[0][:many] == ids[1][:many] and text[0][:letters] == text[1][:letters]

    def _caught_up(self, again: Part) -> Delta | None:
        """What goes beyond what the client has had, once that is there."""
        letters, many, scores = len(self.had.text), len(self.had.ids), len(self.had.scores)
        origins = tuple(again.origins[len(self.had.origins) :])
        if len(again.text) < letters or len(again.ids) < many:
            return None
        return Delta(
            again.text[letters:], tuple(again.ids[many:]), tuple(again.scores[scores:]), origins
        )

    def _differs(self) -> bool:
        """Better no end than the end of another answer."""
        what = "The engine's process ended, and the answer could not be gone on from."
        self.fail(ClosedError(what))
        return True

    def _pass(self, event: Event) -> None:
        try:
            self.deliver(event)
        except Exception:  # a consumer that throws loses its row, nothing else
            self.cancelled = True


class FarTicket:
    """A submitted request of another process."""

    def __init__(self, flight: Flight, cancel: Callable[[], None]):
        self._flight, self._cancel = flight, cancel

    def cancel(self) -> None:
        self._flight.cancelled = True
        self._cancel()
