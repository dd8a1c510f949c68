"""The engine's life, on the fake model: who is told, what is freed, what never hangs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from support import Running, prompt_ids, serving

import pipeline
from pipeline.engine import Engine
from pipeline.errors import BusyError, ClosedError, OpenError
from pipeline.types import Accepted, Failed


def fake(*overrides):
    return serving("drafter=none", "flow=plain", *overrides, recipe="fake")


def last(run, timeout=10):
    """The request's last event; raises if there is none in time."""
    while not hasattr(event := run.events.get(timeout=timeout), "timings") and not isinstance(
        event, Failed
    ):
        pass
    return event


def test_closing_tells_every_open_request():
    with fake("model.delay_ms=3") as engine:
        tokenize = engine.pipeline.stages["tokenize"]
        run = type(tokenize).run
        tokenize.run = lambda batch: (time.sleep(0.3), run(tokenize, batch))
        early, late = Running(engine, "a"), Running(engine, "b")
        assert isinstance(early.events.get(timeout=5), Accepted)
        waiting = Running(engine, "c")
    for request in (early, late, waiting):
        assert isinstance(last(request), Failed)
    with pytest.raises(ClosedError, match="the engine is closed"):
        engine.generate("x")
    with pytest.raises(ClosedError):
        engine.when_idle(print)
    with pytest.raises(ClosedError, match="build another one"):
        engine.open()


def test_a_cancelled_future_does_not_disturb_the_closing():
    with fake("model.delay_ms=3") as engine:
        run = Running(engine, "a")
        next(iter(run))
        assert engine.when_idle(print).cancel()
    assert isinstance(last(run), Failed)


def test_what_kv_cannot_store_is_known_when_it_is_opened(monkeypatch):
    from stages.kv.native import Native

    def refuse(*_):
        raise OpenError("kv: fake keeps state that kv=native cannot store")

    monkeypatch.setattr(Native, "rows", refuse)
    with pytest.raises(OpenError, match="cannot store"), fake():
        pass


def test_a_full_queue_is_refused_at_once():
    with fake("limits.max_rows=1", "limits.max_queue=2", "model.delay_ms=2") as engine:
        runs = [Running(engine, "x", max_tokens=400) for _ in range(3)]
        with pytest.raises(BusyError, match=r"limits\.max_queue"):
            engine.generate("y")
        for run in runs:
            run.ticket.cancel()
        assert [last(run).finish_reason for run in runs] == ["cancelled"] * 3
        assert engine.generate("y", max_tokens=2)["completion_tokens"] == 2


def test_a_cancelled_request_is_not_prepared():
    with fake() as engine:
        tokenize = engine.pipeline.stages["tokenize"]
        run, seen = type(tokenize).run, []
        tokenize.run = lambda batch: (time.sleep(0.05), seen.append(batch), run(tokenize, batch))
        runs = [Running(engine, "x", max_tokens=2) for _ in range(12)]
        for request in runs[4:]:
            request.ticket.cancel()
        assert [last(r).finish_reason for r in runs] == ["length"] * 4 + ["cancelled"] * 8
        assert len(seen) < 8


def test_a_panic_while_a_request_is_prepared_is_its_failure(monkeypatch):
    """Libraries in Rust raise what is no Exception; nobody may wait for ever."""

    class Panic(BaseException):
        pass

    with serving() as engine:
        tokenize = engine.pipeline.stages["tokenize"]
        with monkeypatch.context() as patched:
            patched.setattr(tokenize, "run", lambda batch: (_ for _ in ()).throw(Panic("ouch")))
            with pytest.raises(RuntimeError, match="ouch"):
                engine.generate([1, 2, 3], max_tokens=1)
        assert engine.generate([1, 2, 3], max_tokens=1)["token_ids"]


def test_cancels_at_any_moment_leave_nothing_open():
    with fake("model.delay_ms=0.2", "tier=ram") as engine:
        runs = [Running(engine, prompt_ids(9, seed=s), max_tokens=30) for s in range(40)]
        threads = [
            threading.Timer(0.002 * index, run.ticket.cancel) for index, run in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        assert {last(run).finish_reason for run in runs} <= {"cancelled", "length"}
        assert engine.drain(5)
        assert engine.stats()["rows"]["open_requests"] == 0


def test_faults_of_tiers_are_misses(monkeypatch):
    with fake("tier=ram", "model.layers=1") as engine:
        prompt = prompt_ids(40)
        want = engine.generate(prompt, max_tokens=5)["token_ids"]
        tier = engine.pipeline.parts["tier"][0]
        for name in ("lookup", "covered", "put", "idle_step"):
            with monkeypatch.context() as patch:
                patch.setattr(tier, name, raise_it)
                for _ in range(3):
                    assert engine.generate(prompt, max_tokens=5)["token_ids"] == want, name
        assert engine.health()["status"] == "ok"


def test_faults_do_not_keep_what_they_borrowed(monkeypatch):
    with fake("tier=ram", "model.layers=1") as engine:
        prompt = prompt_ids(40)
        want = engine.generate(prompt, max_tokens=5)["token_ids"]
        prefill = engine.pipeline.stages["chunked_prefill"]
        run, calls = type(prefill).run, []

        def faulty(batch):
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("no memory")
            run(prefill, batch)

        monkeypatch.setattr(prefill, "run", faulty)
        assert engine.generate(prompt, max_tokens=5)["token_ids"] == want
        assert engine.stats()["tiers"]["ram"]["leases"] == 0


def test_a_finished_request_is_freed():
    with fake("tier=ram", "model.layers=1") as engine:
        gc.disable()
        try:
            run = Running(engine, prompt_ids(20), max_tokens=5)
            sequence = weakref.ref(run.ticket.sequence)
            last(run)
            del run
            engine.generate("another", max_tokens=2)
            assert sequence() is None
        finally:
            gc.enable()


def test_idle_work_does_not_keep_requests_waiting():
    with fake() as engine:
        order = []
        hold = engine.when_idle(lambda: time.sleep(0.2))
        pieces = [
            engine.when_idle(lambda i=i: (time.sleep(0.05), order.append(i))) for i in range(6)
        ]
        time.sleep(0.05)
        run = Running(engine, "x", max_tokens=2)
        last(run)
        order.append("answer")
        for piece in [hold, *pieces]:
            piece.result(10)
        assert order.index("answer") <= 2


def raise_it(*_, **__):
    raise RuntimeError("a tier's own fault")


def test_two_engines_in_one_process():
    with pipeline.load("fake") as one, pipeline.load("fake", "model.seed=3") as two:
        assert one.generate("x", max_tokens=5)["text"] != two.generate("x", max_tokens=5)["text"]


def test_a_flush_that_nobody_waits_for_any_more_is_not_made():
    ran = []
    spill = SimpleNamespace(flush_step=lambda: ran.append(1))
    built = SimpleNamespace(
        parts={"adapters": None}, stages={"spill": spill}, phases={"idle": ["spill"]}, settings={}
    )
    engine = Engine(built)  # its thread is not started: always busy
    assert engine.flush(0.01) == {"durable": False, "reason": "not done within 0.01 s"}
    assert not engine.ownership.run_due(idle=True) and not ran
