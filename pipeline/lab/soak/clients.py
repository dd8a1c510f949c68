"""The clients: each asks, leaves, sends rubbish and looks around, one thing after the other."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.lab.soak.answers import Broken, Said
from pipeline.lab.soak.client import Leaving, Refused, ask, call, leave
from pipeline.lab.soak.questions import RESPONSES, Question
from pipeline.lab.soak.rubbish import rubbish

LEAVES, SPOILS, LOOKS = 0.30, 0.10, 0.05  # shares of all requests
PAGES = ("/v1/models", "/stats", "/metrics", "/ready", "/openapi.json")
SHOWN = 20  # faults that are told in full
Fault = OSError | http.client.HTTPException | Broken | Refused | ValueError | LookupError


@dataclass
class Seen:
    """What all clients have seen. Written by all of them."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    prefills: list[tuple[float, float]] = field(default_factory=list)  # of long prompts, monotonic
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *names: str) -> None:
        with self.lock:
            self.counts.update(names)

    def fault(self, kind: str, what: str) -> None:
        with self.lock:
            self.counts[kind] += 1
            if len(self.faults) < SHOWN:
                self.faults.append(f"{kind}: {what}"[:600])


def alone(port: int, asked: list[Question]) -> tuple[dict[str, Said], list[str]]:
    """The right answers: each question asked while nothing else runs; and what this recipe refuses."""
    answers, refused = {}, []
    for question in asked:
        try:
            answers[question.name] = _whole(port, question, stream=False)
        except Refused as error:
            if error.status != 400:
                raise
            refused.append(f"{question.name}: {json.loads(error.body)['error']['message']}")
    return answers, refused


def _whole(port: int, question: Question, *, stream: bool, begun: Any = lambda: None) -> Said:
    said, name = ask(port, question.path, question.body, stream=stream, begun=begun)
    if question.then is None:
        return said
    body = {**question.then, "previous_response_id": name}
    second, last = ask(port, question.path, body, stream=stream)
    for each in (name, last):
        call(port, "DELETE", f"{RESPONSES}/{each}")
    return [said, second]


class Client:
    """One of them, until `stop`. The same seed does the same things."""

    def __init__(
        self, port: int, right: Mapping[str, Said], asked: list[Question], seen: Seen, seed: int
    ):
        self._port, self._right, self._seen = port, right, seen
        self._asked = [question for question in asked if question.name in right]
        self._draw = random.Random(seed)

    def run(self, gate: threading.Event, stop: threading.Event) -> None:
        """While the gate is open."""
        while gate.wait() and not stop.is_set():
            question = self._draw.choice(self._asked)
            chance = self._draw.random()
            self._seen.count("requests")
            try:
                if chance < LEAVES:
                    self._leave(question)
                elif chance < LEAVES + SPOILS:
                    self._spoil(question)
                elif chance < LEAVES + SPOILS + LOOKS:
                    call(self._port, "GET", self._draw.choice(PAGES))
                else:
                    self._ask(question)
            except Refused as error:
                self._refused(error, question)
            except (OSError, http.client.HTTPException, Broken, ValueError, LookupError) as error:
                self._seen.fault("unanswered", f"{question.name}: {error!r}")

    def _ask(self, question: Question) -> None:
        stream = question.streams and self._draw.random() < 0.6
        with self._prefill(question) as begun:
            said = _whole(self._port, question, stream=stream, begun=begun)
        self._seen.count("answers")
        if said != (right := self._right[question.name]):
            self._seen.fault("different", f"{question.name}: {said} and not {right}")

    @contextlib.contextmanager
    def _prefill(self, question: Question) -> Iterator[Any]:
        """Keeps when a long prompt came in; gives what is to be called at its first byte."""
        start, first = time.monotonic(), threading.Event()

        def begun() -> None:
            if question.long and not first.is_set():
                self._seen.prefills.append((start, time.monotonic()))
            first.set()

        yield begun

    def _leave(self, question: Question) -> None:
        self._seen.count("left")
        leaving = Leaving.draw(self._draw, question.streams)
        with contextlib.suppress(ConnectionError):  # the server may have hung up first
            leave(self._port, question.path, question.body, leaving)

    def _spoil(self, question: Question) -> None:
        if not question.streams:
            return
        self._seen.count("spoilt")
        try:
            call(self._port, "POST", question.path, rubbish(self._draw, question))
        except Refused as error:
            if error.status < 500:
                return
            raise
        self._seen.fault("taken", f"{question.name}: rubbish got a 200")

    def _refused(self, error: Refused, question: Question) -> None:
        if error.status == 429:
            self._seen.count("busy")
            time.sleep(0.2)
        else:
            kind = "our_fault" if error.status >= 500 else "unanswered"
            self._seen.fault(kind, f"{question.name}: {error}")
