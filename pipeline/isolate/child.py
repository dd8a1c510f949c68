"""The engine's process. `python -m pipeline.isolate.child CONNECTION PARENT`: a socket's number and who
started it; standard input holds what is to be served, pickled by that process.

It ends by order, or with its parent: signals that a terminal or a service manager sends to a whole group
are the parent's to answer.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pipeline.engine import Engine, Ticket
from pipeline.errors import ClosedError
from pipeline.isolate.calls import LONG, calls, told_of
from pipeline.isolate.faults import Fault
from pipeline.isolate.pulse import Pulse
from pipeline.isolate.wire import (
    Call,
    Cancel,
    Close,
    Line,
    Opened,
    Order,
    Refused,
    Reply,
    Submit,
    Text,
    Told,
)
from pipeline.types import Done, Event, Failed

CALLERS = 8  # calls answered at once, as many of those that take LONG
PR_SET_PDEATHSIG = 1  # linux/prctl.h
OURS = ("server", "telemetry")  # groups that the server's process uses itself


def main(connection: int, parent: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent)
    served = pickle.load(sys.stdin.buffer)
    line = Line(socket.socket(fileno=connection), Order)
    pulse = Pulse(line)
    pulse.start()
    try:
        pulse.engine = engine = served.open()
    except Exception as error:
        line.say(line.said(Refused(Fault.of(error))))
        line.close()
        return 1
    return Attendant(engine, line).serve()


def die_with(parent: int) -> None:
    """By SIGKILL, at once, on Linux; elsewhere the connection's end does it. Whatever it was writing, the next
    start on the same folder serves."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Attendant:
    """Does what the connection orders with an open engine."""

    def __init__(self, engine: Engine, line: Line):
        self.engine, self.line = engine, line
        self._calls = calls(engine)
        self._short = ThreadPoolExecutor(CALLERS, "headrace-calls")
        self._long = ThreadPoolExecutor(CALLERS, "headrace-works")
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket | None] = {}  # of requests without a last event
        self._closing = False
        self._watch = threading.Thread(target=self._end_with_engine, daemon=True)

    def serve(self) -> int:
        self.line.say(self.line.said(self._opened()))
        self._watch.start()
        for order in self.line.heard():
            match order:
                case Submit(id=id, request=request):
                    self._submit(id, request)
                case Cancel(id=id):
                    self._cancel(id)
                case Call(name=name):
                    pool = self._long if name in LONG else self._short
                    pool.submit(self._answer, order)
                case Told() | Reply():  # to what could not be said or read
                    self.line.say(order)
                case Close():
                    self._closing = True
                    self.engine.close()
                    self.line.close()
                    return 0
        os._exit(1)  # nobody is left to serve

    def _opened(self) -> Opened:
        text, built = self.engine.tokenizer, self.engine.pipeline
        info = self.engine.target_info
        words = tuple(text.token_bytes(i).decode("latin-1") for i in range(info["vocab_size"]))
        known = Text(text.template, text.identity, text.special_ids, told_of(text), words)
        resumable = any("resume" in names for names in built.phases.values())
        settings = {group: built.config.get(group) or {} for group in OURS}  # type: ignore[attr-defined]
        device = self.engine.health()["device"]
        return Opened(info, device, settings, known, resumable)

    def _submit(self, id: int, request: Any) -> None:
        self._tickets[id] = None
        try:
            ticket = self.engine.submit(request, partial(self._tell, id))
        except Exception as error:
            self._tell(id, Failed(error))
            return
        with self._lock:
            if id in self._tickets:
                self._tickets[id] = ticket

    def _cancel(self, id: int) -> None:
        if ticket := self._tickets.get(id):
            ticket.cancel()

    def _tell(self, id: int, event: Event) -> None:
        """On the engine's thread, mostly."""
        if isinstance(event, Failed):
            if isinstance(event.error, ClosedError) and not self._closing:
                return  # this process is about to end: the other one knows what that means for whom
            self.line.say(Told(id, Fault.of(event.error)))
        else:
            self.line.say(Told(id, event))
        if isinstance(event, Done | Failed):
            with self._lock:
                self._tickets.pop(id, None)

    def _answer(self, call: Call) -> None:
        try:
            self.line.say(Reply(call.id, self._calls[call.name](**call.args)))
        except Exception as error:
            self.line.say(Reply(call.id, fault=Fault.of(error)))

    def _end_with_engine(self) -> None:
        """An engine whose thread has failed does not come back; a new process does."""
        self.engine.wait()
        if not self._closing:
            os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2])))
