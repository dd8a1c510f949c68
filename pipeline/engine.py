"""The engine: one thread that owns MLX, queues around it, plain data in and out.

Threads: callers of `submit` (any), a small pool that prepares requests (phase `admit`), and the
owner, which opens the parts, runs every other phase and closes them again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any, Protocol

from pipeline.errors import BusyError, ClosedError, HeadraceError
from pipeline.ownership import Ownership, Work
from pipeline.results import collect
from pipeline.scheduler import Turns, done
from pipeline.trace import Telemetry, Totals
from pipeline.types import (
    Accepted,
    Batch,
    Delta,
    Done,
    Event,
    Failed,
    Request,
    Sampling,
    Sequence,
    Stage,
)

PREPARATION_THREADS = 2
SAMPLING_FIELDS = frozenset(f.name for f in fields(Sampling))


class Pipeline(Protocol):
    """What `build` makes of a recipe. `open` and `close` are called on the owner's thread."""

    parts: dict[str, Any]
    stages: dict[str, Stage]
    phases: dict[str, list[str]]
    settings: dict[str, Any]

    def open(self) -> None: ...
    def close(self) -> None: ...


class Ticket:
    """A submitted request. `cancel` ends its row at the next boundary; it may be called twice."""

    def __init__(self, sequence: Sequence, wake: Callable[[], None]):
        self.sequence, self._wake = sequence, wake

    def cancel(self) -> None:
        self.sequence.cancelled = True
        self._wake()


class Engine:
    """Serves one built pipeline. Use as a context manager, or call `open` and `close`."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.totals = Totals()
        self.ownership = Ownership(self._wake)
        self._turns = Turns(
            pipeline, pipeline.settings.get("telemetry") or Telemetry(), self.totals
        )
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._open_requests: set[int] = set()  # ids of sequences without a last event
        self._lock = threading.Lock()
        self._state = "new"  # new | open | draining | failed | closed
        self._opened: Future[None] = Future()
        self._pool = ThreadPoolExecutor(PREPARATION_THREADS, "headrace-prepare")
        self._thread = threading.Thread(target=self._own, name="headrace-owner", daemon=True)

    # --- life

    def __enter__(self) -> Engine:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self) -> None:
        """Load everything. Errors of the parts are raised here, before any request."""
        self._thread.start()
        self._opened.result()

    def close(self) -> None:
        """Stop admission, end open requests with ClosedError, free everything."""
        with self._lock:
            was, self._state = self._state, "closed" if self._state != "failed" else "failed"
        self._pool.shutdown(wait=True)
        self._wake()
        if was != "new" and self._thread is not threading.current_thread():
            self._thread.join()

    def drain(self, timeout_s: float) -> bool:
        """Stop admission and wait for the open requests; True if all ended in time."""
        with self._lock:
            if self._state == "open":
                self._state = "draining"
        until = time.monotonic() + timeout_s
        while self._open_requests and time.monotonic() < until:
            time.sleep(0.01)
        return not self._open_requests

    # --- requests

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Ticket:
        """Queue a request; events arrive through `deliver`, which must not block: `Accepted`,
        `Delta`s, then exactly one of `Done` and `Failed` (a `Failed` before `Accepted` is a refusal).
        BusyError if the queue is full, ClosedError if the engine is not open."""
        sequence = Sequence(request, deliver, submitted=time.perf_counter())
        sequence.deliver = self._delivery(sequence, deliver)
        limits = self.pipeline.parts["limits"]
        with self._lock:
            if self._state != "open":
                raise ClosedError(f"the engine is {self._state}")
            if len(self._open_requests) >= limits.max_queue + limits.max_rows:
                self.totals.counts["requests_refused"] += 1
                raise BusyError(
                    f"the queue is full: {limits.max_queue} requests wait (limits.max_queue)"
                )
            self._open_requests.add(id(sequence))
        self._pool.submit(self._prepare, sequence)
        return Ticket(sequence, self._wake)

    def stream(self, prompt: Prompt, **wanted: Any) -> Iterator[Delta | Done]:
        """Deltas as they come, then `Done`. `wanted` are fields of Request and of Sampling."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = self.submit(self.request(prompt, **wanted), events.put)
        try:
            while True:
                event = events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta | Done):
                    yield event
                if isinstance(event, Done):
                    return
        finally:
            ticket.cancel()

    def generate(self, prompt: Prompt, **wanted: Any) -> dict[str, Any]:
        """The whole answer as one plain dict: text, token_ids, usage, timings, speculation."""
        return collect(self.stream(prompt, **wanted))

    def request(self, prompt: Prompt, **wanted: Any) -> Request:
        """A Request for a chat (list of messages), ids (list of int), or text: one user turn where
        the model has a chat template, unless `raw=True`."""
        raw = wanted.pop("raw", False)
        said = {name: wanted.pop(name) for name in list(wanted) if name in SAMPLING_FIELDS}
        wanted |= {"id": wanted.get("id") or uuid.uuid4().hex, "sampling": Sampling(**said)}
        if not isinstance(prompt, str):
            chat = bool(prompt) and isinstance(prompt[0], Mapping)
            wanted["messages" if chat else "token_ids"] = tuple(prompt)
            return Request(**wanted)
        if self.tokenizer.template is None or raw:
            return Request(text=prompt, **wanted)
        return Request(messages=({"role": "user", "content": prompt},), **wanted)

    # --- what is known

    @property
    def tokenizer(self) -> Any:
        return self.pipeline.parts["model"].tokenizer

    @property
    def target_info(self) -> dict[str, Any]:
        model = self.pipeline.parts["model"]
        context = self.pipeline.parts["limits"].context or model.context_len
        return {
            "name": model.name,
            "context_len": min(context, model.context_len),
            "vocab_size": model.vocab_size,
            "eos_ids": sorted(model.eos_ids),
            "dtype": model.dtype,
            "weight_bytes": model.weight_bytes,
            "template": model.tokenizer.template is not None,
        }

    def stats(self) -> dict[str, Any]:
        """Plain numbers; safe from any thread, exact only between rounds."""
        turns, parts = self._turns, self.pipeline.parts
        active = turns.active.rows
        return {
            "state": self._state,
            "rows": {
                "active": len(turns.active.sequences),
                "prefilling": sum(len(b.sequences) for b in list(turns.prefills)),
                "waiting": len(turns.waiting),
                "open_requests": len(self._open_requests),
                "max": parts["limits"].max_rows,
            },
            "target_calls": parts["model"].calls,
            "kv_bytes": active.nbytes() if active is not None and turns.active.sequences else 0,
            "tiers": {tier.name: dict(tier.stats()) for tier in parts["tier"]},
            **self.totals.as_dict(),
        }

    def health(self) -> dict[str, Any]:
        alive = self._thread.is_alive() and self._state in ("open", "draining")
        device = self.pipeline.parts["device"].describe() if alive else {}
        status = "ok" if alive else self._state
        return {"status": status, "state": self._state, "device": dict(device)}

    # --- other work on the owner's thread

    def exclusive(self, work: Work) -> Any:
        """Run `work` alone: admission is held, active rows drain first. Blocks for the result."""
        return self.ownership.exclusive(work).result()

    def when_idle(self, work: Work) -> Future[Any]:
        """Run `work` when nothing is active; never makes a request wait for more than itself."""
        return self.ownership.when_idle(work)

    # --- preparation pool

    def _prepare(self, sequence: Sequence) -> None:
        try:
            self._admit(sequence)
        except HeadraceError as refusal:
            sequence.deliver(Failed(refusal))
        except Exception as fault:
            self.totals.counts["faults"] += 1
            sequence.deliver(Failed(fault))

    def _admit(self, sequence: Sequence) -> None:
        batch = Batch([sequence], None, None)  # type: ignore[arg-type]  # nothing has rows yet
        for name in self.pipeline.phases["admit"]:
            began = time.perf_counter()
            self.pipeline.stages[name].run(batch)
            sequence.timings[name] = time.perf_counter() - began
        sequence.deliver(Accepted(len(sequence.prompt_ids)))
        if sequence.max_new == 0:
            sequence.finish_reason = "length"
            sequence.deliver(done(sequence))
        else:
            self._inbox.put(sequence)

    def _delivery(
        self, sequence: Sequence, deliver: Callable[[Event], None]
    ) -> Callable[[Event], None]:
        """`deliver`, with the books kept; a consumer that throws loses its row, nothing else."""

        def send(event: Event) -> None:
            if isinstance(event, Done | Failed):
                self._open_requests.discard(id(sequence))
            try:
                deliver(event)
            except Exception:
                sequence.cancelled = True

        return send

    # --- owner thread

    def _wake(self) -> None:
        self._inbox.put(None)

    def _own(self) -> None:
        try:
            self.pipeline.open()
            self._turns.try_rows()
        except BaseException as error:
            self._state = "failed"
            self.pipeline.close()
            self._opened.set_exception(error)
            return
        self._state = "open"
        self._opened.set_result(None)
        ending = ClosedError("the engine has stopped")
        try:
            self._loop()
        except Exception as fault:
            logging.getLogger(__name__).exception("the engine's thread has failed")
            self._state, ending = "failed", ClosedError(f"the engine has failed: {fault!r}")
        finally:
            self._shut(ending)

    def _loop(self) -> None:
        while self._state in ("open", "draining"):
            self._receive(block=not self._turns.busy)
            self._turns.turn(admit=not self.ownership.holds_admission)
            if not self._turns.rows_in_use:
                self.ownership.run_due()
                self._idle()

    def _receive(self, *, block: bool) -> None:
        """Take what has arrived; with nothing to do, wait for something."""
        while True:
            try:
                sequence = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if sequence is not None:
                self._turns.waiting.append(sequence)

    def _idle(self) -> None:
        if self._turns.busy or not self._inbox.empty():
            return
        nobody = Batch([], None, None)  # type: ignore[arg-type]
        for name in self.pipeline.phases.get("idle", ()):
            self.pipeline.stages[name].run(nobody)

    def _shut(self, error: Exception) -> None:
        self.ownership.close()
        self._receive(block=False)
        self._turns.fail_all(error)
        self._turns.close()
        self.pipeline.close()
        self._open_requests.clear()


Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
