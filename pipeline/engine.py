"""The engine: one thread that owns MLX, queues around it, plain data in and out.

Threads: callers of `submit` (any), a small pool that prepares requests (phase `admit`), and the
owner, which opens the parts, runs every other phase and closes them again.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from pipeline.asking import Prompt, make_request
from pipeline.errors import BusyError, ClosedError, HeadraceError
from pipeline.known import coverage, served
from pipeline.leases import Leases
from pipeline.mounting import Mounts
from pipeline.ownership import Ownership, Work
from pipeline.results import collect, until_done
from pipeline.scheduler import Turns, nobody
from pipeline.trace import Telemetry, Totals, done
from pipeline.types import (
    Accepted,
    Batch,
    Delta,
    Done,
    Event,
    Failed,
    Request,
    Sequence,
    Stage,
)

PREPARATION_THREADS = 2
READ_POLL_S = 0.001  # how soon to look whether a saved state has been read


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
        self.adapters = Mounts(pipeline.parts, self.exclusive)
        self.leases = Leases(self.ownership, self._lent)
        self._turns = Turns(
            pipeline, pipeline.settings.get("telemetry") or Telemetry(), self.totals
        )
        self._inbox: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._open_requests: set[int] = set()  # ids of sequences without a last event
        self._lock = threading.Lock()
        self._state = "new"  # new | opening | open | draining | failed | closed
        self._kv: dict[str, Any] = {}  # what the KV policy does to the model; known once it is open
        self._ending: ClosedError | None = None  # set once nothing takes from the inbox any more
        self.rounds = 0  # of its thread; it waits for something to do in between
        self.waits = False
        self._again_s: float | None = None  # when idle work wants to go on without news
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
        with self._lock:
            if self._state != "new":
                raise ClosedError(f"the engine is {self._state}: build another one")
            self._state = "opening"
        self._thread.start()
        self._opened.result()

    def close(self) -> None:
        """Stop admission, end open requests with ClosedError, free everything."""
        with self._lock:
            was, self._state = self._state, "closed" if self._state != "failed" else "failed"
        self._pool.shutdown(wait=threading.current_thread() is not self._thread)
        self._wake()
        if was != "new" and self._thread is not threading.current_thread():
            self._thread.join()

    def wait(self) -> None:
        """Until the engine's thread has ended, by `close` or by a fault."""
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
        limits = self.pipeline.parts["limits"]
        with self._lock:
            if self._state != "open":
                raise ClosedError(f"the engine is {self._state}")
            if len(self._open_requests) >= limits.max_queue + limits.max_rows:
                self.totals.counts["requests_refused"] += 1
                what = f"the queue is full: {limits.max_queue} requests wait (limits.max_queue)"
                raise BusyError(what)
            sequence.deliver = self._delivery(sequence, deliver)
            self._open_requests.add(id(sequence))
            self._pool.submit(self._prepare, sequence)
        return Ticket(sequence, self._wake)

    def stream(self, prompt: Prompt, **wanted: Any) -> Iterator[Delta | Done]:
        """Deltas as they come, then `Done`. `wanted` are fields of Request and of Sampling."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ticket = self.submit(self.request(prompt, **wanted), events.put)
        try:
            yield from until_done(events.get)
        finally:
            ticket.cancel()

    def generate(self, prompt: Prompt, **wanted: Any) -> dict[str, Any]:
        """The whole answer as one plain dict: text, token_ids, usage, timings, speculation."""
        return collect(self.stream(prompt, **wanted))

    def request(self, prompt: Prompt, **wanted: Any) -> Request:
        """A Request for a chat (list of messages), ids (list of int), or text: one user turn where
        the model has a chat template, unless `raw=True`. RequestError names a wrong field."""
        return make_request(prompt, wanted, has_template=self.tokenizer.template is not None)

    # --- what is known

    @property
    def tokenizer(self) -> Any:
        if self._state in ("new", "opening"):
            raise ClosedError("the engine is not open: use `with pipeline.load(…) as engine:`")
        return self.pipeline.parts["model"].tokenizer

    @property
    def target_info(self) -> dict[str, Any]:
        return served(self.pipeline.parts)

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
            "drafter": {
                "namespace": parts["drafter"].namespace,
                "weight_bytes": getattr(parts["drafter"], "weight_bytes", 0),
            },
            "kv_bytes": active.nbytes() if active is not None and turns.active.sequences else 0,
            "kv": dict(self._kv),
            "adapters": self.adapters.summary(),
            "memory": dict(parts["limits"].stats(turns.running, turns.waiting.kept)),
            "tiers": {tier.name: dict(tier.stats()) for tier in parts["tier"]},
            "spill": self._idle_stats(),
            **self.totals.as_dict(),
        }

    def _idle_stats(self) -> dict[str, Any]:
        told = [stage.stats() for stage in self._idle_stages() if hasattr(stage, "stats")]
        return {name: value for stats in told for name, value in stats.items()}

    def describe(self) -> dict[str, Any]:
        """What is served: graph, choices, settings and who said them. Plain data, any thread."""
        from pipeline.portrait import portrait  # knows YAML, which an engine of toys does not need

        return portrait(self.pipeline)  # type: ignore[arg-type]

    def health(self) -> dict[str, Any]:
        alive = self._thread.is_alive() and self._state in ("open", "draining")
        device = self.pipeline.parts["device"].describe() if alive else {}
        status = "ok" if alive else self._state
        return {"status": status, "state": self._state, "device": dict(device)}

    # --- other work on the owner's thread

    def exclusive(self, work: Work) -> Any:
        """Run `work` alone: admission is held, active rows drain first. Blocks for the result."""
        return self.ownership.exclusive(work).result()

    def _lent(self) -> bool:
        """A lease asks whether it may go on. Each time counts as a round: who holds one is not stuck."""
        self.rounds += 1
        return self._state == "open"

    def when_idle(self, work: Work) -> Future[Any]:
        """Run `work` when nothing is active; never makes a request wait for more than itself."""
        return self.ownership.when_idle(work)

    def flush(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """Write what is to survive the process, step by step while nothing runs, and tell the truth:
        `durable` is true only if all of it is written. Blocks; not for the owner's thread."""
        until = time.monotonic() + timeout_s
        for stage in self._idle_stages():
            while step := getattr(stage, "flush_step", None):
                work = self.when_idle(step)
                try:
                    report = work.result(max(0.0, until - time.monotonic()))
                except TimeoutError:
                    work.cancel()  # nobody waits for it any more
                    return {"durable": False, "reason": f"not done within {timeout_s} s"}
                if report is not None:
                    return dict(report)
        return {"durable": False, "reason": "the flow has no stage that writes saved states"}

    def close_session(self, session_id: str) -> None:
        """Its states are like others from now on; nothing is lost. From any thread."""
        for tier in self.pipeline.parts["tier"]:
            if "sessions" in tier.can:
                tier.forget(session_id)

    # --- preparation pool

    def _prepare(self, sequence: Sequence) -> None:
        try:
            self._admit(sequence)
        except BaseException as panic:  # of a library in Rust, say: nobody must wait for ever
            fault = panic if isinstance(panic, Exception) else RuntimeError(repr(panic))
            self.totals.counts["faults"] += not isinstance(fault, HeadraceError)
            sequence.deliver(Failed(fault))
            del fault  # which knows this frame: a cycle

    def _admit(self, sequence: Sequence) -> None:
        if sequence.cancelled:
            sequence.deliver(done(sequence))
            return
        batch = Batch([sequence], None, None)  # type: ignore[arg-type]  # nothing has rows yet
        for name in self.pipeline.phases["admit"]:
            began = time.perf_counter()
            self.pipeline.stages[name].run(batch)
            sequence.timings[name] = time.perf_counter() - began
            with self._lock:
                self.totals.step("admit", name, sequence.timings[name])
        sequence.deliver(Accepted(len(sequence.prompt_ids), sequence.thinking, sequence.seed))
        if sequence.max_new == 0 and sequence.request.prompt_logprobs is None:
            sequence.finish_reason = "length"
            sequence.deliver(done(sequence))
            return
        with self._lock:
            if self._ending is not None:
                raise self._ending
            self._inbox.put(sequence)

    def _delivery(
        self, sequence: Sequence, deliver: Callable[[Event], None]
    ) -> Callable[[Event], None]:
        """`deliver`, with the books kept; a consumer that throws loses its row, nothing else."""

        def send(event: Event) -> None:
            if isinstance(event, Done | Failed):
                self._open_requests.discard(id(sequence))
                sequence.deliver = nobody  # `send` knows the sequence: a cycle
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
            self._turns.rehearse()
            self._kv = coverage(self.pipeline.parts)
        except BaseException as error:
            self._state = "failed"
            self._shut(ClosedError("the engine could not be opened"))
            self._opened.set_exception(error)
            return
        with self._lock:
            if self._state == "opening":
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
        more = False  # work that is no request is left
        while self._state in ("open", "draining"):
            self.rounds += 1
            if self._turns.stalled:
                self._again_s = READ_POLL_S
            wait = self._turns.stalled or not (self._turns.busy or more)
            self._receive(block=wait, timeout_s=self._again_s)
            self._again_s = None
            self._turns.turn(admit=not self.ownership.holds_admission)
            more = not self._turns.rows_in_use and self._background()

    def _receive(self, *, block: bool, timeout_s: float | None = None) -> None:
        """Take what has arrived; with nothing to do, wait for something."""
        while True:
            self.waits = block
            try:
                sequence = self._inbox.get(block=block, timeout=timeout_s)
            except queue.Empty:
                return
            finally:
                self.waits = block = False
            if sequence is not None:
                self._turns.waiting.append(sequence)

    def _background(self) -> bool:
        """One piece of other work, then one idle step; True if more is left to do."""
        idle = not self._turns.busy and self._inbox.empty()
        more = self.ownership.run_due(idle=idle)
        if idle and not more:
            self._idle()
        return more

    def _idle(self) -> None:
        """One step of each idle stage. One that wants to be called again though nothing has happened
        says in `again_s` after how many seconds."""
        nobody = Batch([], None, None)  # type: ignore[arg-type]
        soon = []
        for name in self.pipeline.phases.get("idle", ()):
            stage, began = self.pipeline.stages[name], time.perf_counter()
            try:
                stage.run(nobody)
                self.totals.step("idle", name, time.perf_counter() - began)
                soon.append(getattr(stage, "again_s", None))
            except Exception:
                self.totals.counts["faults"] += 1
                logging.getLogger(__name__).warning("idle stage %s failed", stage, exc_info=True)
        self._again_s = min((seconds for seconds in soon if seconds is not None), default=None)

    def _idle_stages(self) -> list[Any]:
        names = self.pipeline.phases.get("idle", ())
        return [self.pipeline.stages[name] for name in names]

    def _shut(self, ending: ClosedError) -> None:
        """Tell everybody, free everything; no step keeps the next one from running."""
        with self._lock:
            self._ending = ending
        self._receive(block=False)
        steps = (self.ownership.close, lambda: self._turns.fail_all(ending), self._turns.close)
        for step in (*steps, self.pipeline.close):
            try:
                step()
            except Exception:
                logging.getLogger(__name__).warning("while closing", exc_info=True)
