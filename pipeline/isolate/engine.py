"""An engine in a process of its own, with the face that the server knows (`ServedEngine`).

One thread starts the process, hears what it says, and starts another when it is gone. What was in
flight then gets an error, or, where answers are resumable, is asked again and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

from pipeline.errors import ClosedError, OpenError
from pipeline.isolate.faults import Fault
from pipeline.isolate.flight import MOST_GOES, FarTicket, Flight
from pipeline.isolate.leases import FarLeases
from pipeline.isolate.mounts import FarMounts
from pipeline.isolate.patience import Patience
from pipeline.isolate.process import EngineProcess
from pipeline.isolate.pulse import Silence
from pipeline.isolate.text import FarText
from pipeline.isolate.wire import (
    Beat,
    Call,
    Cancel,
    Close,
    Opened,
    Refused,
    Reply,
    Submit,
    Told,
)
from pipeline.server.settings import ServerSettings
from pipeline.trace import Telemetry
from pipeline.types import Done, Event, Failed, Request

log = logging.getLogger("headrace.isolate")

CALL_S = 10.0  # for an answer to what needs no time
END_S = 10.0  # for the end of a process that has hung up
CLOSE_S = 120.0  # for the end of a process that was told to end; it may have states to write


class IsolatedEngine:
    """Everything but `open`, `drain`, `flush` and `close` returns within `CALL_S`."""

    def __init__(self, served: Any, again: Any = None):
        """`again`: what those serve that are started later, if that is said otherwise."""
        self._served, self._served_again = served, again or served
        self._lock = threading.RLock()
        self._settled = threading.Condition(self._lock)  # no longer restarting
        self._state = "new"  # new | opening | open | restarting | draining | failed | closed
        self._process: EngineProcess | None = None
        self._up = False  # it takes requests
        self._opened: Opened | None = None
        self._first: Future[None] = Future()
        self._numbers = itertools.count()
        self._flights: dict[int, Flight] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._changes: dict[
            int, Callable[[], None]
        ] = {}  # number of a call -> what it changes here
        self._counts = {"restarts": 0, "requests_lost": 0, "requests_asked_again": 0}
        self._figures: Mapping[str, Any] = {}
        self._ended = ""  # how the last process did
        self._patience = Patience()
        self._silence = Silence(lambda: self._patience.silence_s(self._up), self._hangs)
        self.adapters = FarMounts(self._ask)
        self._stop = threading.Event()
        self.leases = FarLeases(self._ask, lambda: self._state == "open")
        self._thread = threading.Thread(target=self._attend, name="headrace-engine", daemon=True)

    # --- life

    def open(self) -> None:
        """Start it, and wait until it takes requests. What it could not open is raised here."""
        self._state = "opening"
        self._thread.start()
        self._silence.start()
        self._first.result()

    def close(self) -> None:
        """End open requests with ClosedError, write what is to survive; the process ends by itself, or is
        ended."""
        with self._lock:
            if self._state in ("new", "closed"):
                return
            self._state = "closed"
            process = self._process
            if process is not None and self._up:
                process.line.say(Close())
            elif process is not None:
                process.kill()
        self._stop.set()
        self._silence.end()  # it may take long to write states
        self._thread.join(CLOSE_S)
        if process is not None:
            process.kill()
        self._thread.join()

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for those in flight."""
        with self._lock:
            if self._state in ("open", "restarting"):
                self._state = "draining"
        until = time.monotonic() + timeout_s
        while self._flights and time.monotonic() < until and self._thread.is_alive():
            time.sleep(0.01)
        return not self._flights

    # --- requests

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> FarTicket:
        """ClosedError while there is no process; all else arrives as events."""
        flight = Flight(request, deliver)
        with self._lock:
            if self._state != "open":
                raise self._closed()
            number = next(self._numbers)
            self._flights[number] = flight
            self._say(Submit(number, request))
        return FarTicket(flight, partial(self._cancel, number))

    def _cancel(self, number: int) -> None:
        """The process ends its row, and says so; while there is none, it is simply not asked again."""
        with self._lock:
            if self._up:
                self._say(Cancel(number))
            elif flight := self._flights.pop(number, None):
                flight.fail(ClosedError("cancelled"))

    # --- what is known

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The groups that the server itself uses."""
        told = self._known.settings
        server, telemetry = ServerSettings(**told["server"]), Telemetry(**told["telemetry"])
        return {"server": server, "telemetry": telemetry}

    @property
    def target_info(self) -> Mapping[str, Any]:
        return {**self._known.info, "adapters": self.adapters.ids}

    @property
    def tokenizer(self) -> FarText:
        return self._text

    def stats(self) -> dict[str, Any]:
        """The process's; while there is none, the last that is known of the one before."""
        with contextlib.suppress(ClosedError):
            self._figures = self._ask("stats")
        return {**self._figures, "state": self._state, "isolate": self._isolate()}

    def describe(self) -> Mapping[str, Any]:
        told: Mapping[str, Any] = self._ask("describe")
        return told

    def health(self) -> dict[str, Any]:
        """It lives while it can be expected to answer again by itself."""
        alive = self._state in ("open", "draining", "restarting")
        status = "ok" if alive else self._state
        device = dict(self._known.device) if self._up else {}
        told = {"status": status, "state": self._state, "device": device}
        return {**told, "isolate": self._isolate()}

    def _isolate(self) -> dict[str, Any]:
        pid = self._process.pid if self._process else None
        told = {"pid": pid, "last_end": self._ended, "silent_s": self._silence.seconds}
        return {**told, **self._counts}

    # --- other work

    def flush(self, timeout_s: float = 60.0) -> Mapping[str, Any]:
        report: Mapping[str, Any] = self._ask("flush", timeout_s + CALL_S, timeout_s=timeout_s)
        return report

    def close_session(self, session_id: str) -> None:
        self._ask("close_session", session_id=session_id)

    def _ask(
        self,
        name: str,
        within_s: float | None = CALL_S,
        done: Callable[[], None] | None = None,
        /,
        **args: Any,
    ) -> Any:
        """A call's answer; its error is raised. Never on an event loop, where a process that hangs would hold up
        all that is served, nor on the thread that hears it, which calls `done` if it is well: before it hears
        anything else, and however late that is."""
        assert not _on_an_event_loop(), f"{name}: asked on an event loop"
        future: Future[Any] = Future()
        with self._lock:
            if not self._up:
                raise self._closed()
            number = next(self._numbers)
            self._calls[number] = future
            if done is not None:
                self._changes[number] = done
        try:
            with self._lock:
                self._say(Call(number, name, args))
            return future.result(within_s)
        except TimeoutError:
            raise ClosedError(f"The engine has not answered within {within_s:g} s.") from None
        finally:
            self._calls.pop(number, None)

    def _ask_on(self, name: str, /, **args: Any) -> Any:
        """A question about an answer on its way, which lives as long as that does: the next process is asked
        too, where it goes on with the answer, and as often."""
        for _ in range(MOST_GOES - 1):
            try:
                return self._ask(name, None, **args)
            except ClosedError:
                with self._settled:
                    if self._state != "restarting" or not self._known.resumable:
                        raise
                    self._settled.wait_for(lambda: self._state != "restarting")
        return self._ask(name, None, **args)

    def _say(self, message: Any) -> None:
        if self._process is not None:
            self._process.line.say(message)

    def _closed(self) -> ClosedError:
        if self._state == "restarting":
            what = f"The engine's process has ended ({self._ended}) and is being started again."
            return ClosedError(what, retry_after_s=self._patience.expected_s)
        return ClosedError(f"the engine is {self._state}")

    @property
    def _known(self) -> Opened:
        if self._opened is None:
            raise ClosedError("the engine is not open")
        return self._opened

    def _hangs(self, silent_s: float) -> None:
        """It lives and does nothing, and may do so for ever."""
        if (process := self._process) is not None:
            process.kill(f"it gave no sign of life for {silent_s:g} s and was killed")

    # --- the one thread

    def _attend(self) -> None:
        """One process after another, until it is to stop or the patience is at its end."""
        while True:
            self._ended = self._one()
            if not self._again():
                break
            self._counts["restarts"] += 1
        self._finish()

    def _one(self) -> str:
        """From a process's start to its end; how it ended."""
        self._patience.begin()
        self._silence.beat()
        try:
            later = self._first.done()
            served = self.adapters.served(self._served_again if later else self._served)
            process = EngineProcess(served, silent=later)
        except OSError as error:  # no memory for another one, say
            return f"it could not be started: {error}"
        with self._lock:
            self._process = process
            if self._state == "closed":  # meanwhile
                process.kill()
        try:
            for news in process.line.heard():
                self._hear(news)
        except Exception:
            log.exception("the engine's process says what is not understood")
            process.kill()
        return process.end(END_S)

    def _again(self) -> bool:
        """Whether another process is to be started, once its time has come."""
        wait_s = self._patience.wait_s()
        with self._lock:
            serving = self._state in ("open", "restarting")
            going = serving and wait_s is not None
            self._state = "restarting" if going else self._state
            self._lose(going)
        if serving:
            then = f"the next one starts in {wait_s:g} s" if going else "no other one is started"
            log.error("the engine's process has ended (%s): %s", self._ended, then)
        return going and not self._stop.wait(wait_s) and self._state == "restarting"

    def _lose(self, going: bool) -> None:
        """What was in flight is kept for the next process, or has failed."""
        self._process, self._up = None, False
        error = ClosedError(
            f"The engine's process ended ({self._ended}) before the answer was complete.",
            retry_after_s=self._patience.expected_s,
        )
        keeps = going and self._opened is not None and self._opened.resumable
        for number, flight in list(self._flights.items()):
            if keeps and flight.goes < MOST_GOES and not flight.cancelled:
                continue
            self._counts["requests_lost"] += not flight.cancelled
            del self._flights[number]
            flight.fail(error)
        self._changes.clear()
        for future in list(self._calls.values()):
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _finish(self) -> None:
        self._silence.end()
        with self._lock:
            self._lose(going=False)
            if self._state in ("opening", "open", "restarting"):
                self._state = "failed"
            self._settled.notify_all()
        if not self._first.done():
            what = f"the engine's process has ended while it opened: {self._ended}."
            self._first.set_exception(OpenError(f"{what} Is there memory enough?"))

    def _hear(self, news: Any) -> None:
        match news:
            case Told(id=number, event=event):
                self._told(number, Failed(event.error()) if isinstance(event, Fault) else event)
            case Beat():
                self._silence.beat()
            case Reply(id=number, value=value, fault=fault):
                self._settle(number, value, fault)
            case Opened():
                self._start(news)
            case Refused(fault=fault) if self._first.done():
                log.error("the engine cannot be opened again: %s", fault.message)
            case Refused(fault=fault):
                self._state = "failed"
                self._first.set_exception(fault.error())

    def _told(self, number: int, event: Event) -> None:
        if (flight := self._flights.get(number)) is None:
            return
        if last := flight.hear(event):
            del self._flights[number]
        if not isinstance(event, Done) and (last or flight.cancelled):
            self._say(Cancel(number))  # whose event could not be told still runs there

    def _settle(self, number: int, value: Any, fault: Fault | None) -> None:
        change, future = self._changes.pop(number, None), self._calls.get(number)
        if change is not None and fault is None:
            change()
        if future is None or not future.set_running_or_notify_cancel():
            return
        if fault is None:
            future.set_result(value)
        else:
            future.set_exception(fault.error())

    def _start(self, opened: Opened) -> None:
        """It takes requests: first those that another process could not end."""
        with self._lock:
            self._opened = opened
            self._text = FarText(opened.text, self._ask, self._ask_on)
            self.adapters.ids = list(opened.info["adapters"])
            self._patience.opened()
            self._up = True
            for number, flight in self._flights.items():
                flight.next_go()
                self._say(Submit(number, flight.request))
                self._counts["requests_asked_again"] += 1
            if self._state in ("opening", "restarting"):
                self._state = "open"
            self._settled.notify_all()
        if not self._first.done():
            self._patience.told(self.settings["server"])
            self._first.set_result(None)


def _on_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
