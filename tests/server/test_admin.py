"""What only the operator may: drain the server, and have the machine to oneself."""

from __future__ import annotations

import json
import threading
import time

import pytest
from support import Halted, Running

import pipeline
from pipeline.errors import ClosedError
from pipeline.isolate.calls import calls
from pipeline.isolate.leases import FarLeases
from pipeline.server.local import SocketConnection
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.types import Done

COMPLETE = "/v1/completions"


@pytest.fixture
def lent(script, tmp_path):
    """A real engine with a model that needs time, its socket, and a client at its port."""
    path = tmp_path / "socket"
    settings = ServerSettings(socket=str(path), shutdown_s=5, keepalive_s=0.2)
    with (
        pipeline.load("fake", "drafter=none", "model.delay_ms=5") as engine,
        serve_in_thread(engine, settings) as base,
    ):
        yield engine, path, script.Raw(base)


class Lease:
    """A connection that asks for one."""

    def __init__(self, path):
        self.connection = SocketConnection(path, timeout=10)
        self.connection.request("POST", "/admin/lease")
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200

    def next(self) -> str:
        """What it says next; signs of life are passed over."""
        while (line := self.reply.readline()) == b"\n":
            pass
        return json.loads(line)["lease"] if line else "closed"

    def hang_up(self) -> None:
        self.connection.close()
        self.reply.close()


def held(path) -> Lease:
    lease = Lease(path)
    while (state := lease.next()) == "waiting":
        pass
    assert state == "held"
    return lease


def asked(raw, tokens=4, **more):
    """A thread with a request, and what came of it."""
    got: list[int] = []
    body = json.dumps({"prompt": "a b", "max_tokens": tokens, "ignore_eos": True, **more}).encode()
    thread = threading.Thread(target=lambda: got.append(raw.call("POST", COMPLETE, body)[0]))
    thread.start()
    return thread, got


def test_a_lease_waits_for_rows_and_holds_up_new_ones(lent, script):
    engine, path, raw = lent
    before = Halted(engine, "a b")
    lease = Lease(path)
    assert lease.next() == "waiting"
    after, second = asked(raw)
    script.eventually(lambda: engine.stats()["rows"]["open_requests"] == 2)
    before.go()
    assert lease.next() == "held"
    assert isinstance(before.told[-1], Done), "what ran has ended"
    time.sleep(0.3)
    assert not second and engine.stats()["rows"]["active"] == 0
    assert raw.call("GET", "/health")[0] == 200
    lease.hang_up()
    after.join(10)
    assert second == [200]


def test_leases_come_one_after_the_other_and_end_with_their_connection(lent, script):
    _, path, raw = lent
    first = held(path)
    second, third = Lease(path), Lease(path)
    assert (second.next(), third.next()) == ("waiting", "waiting")
    second.hang_up()  # it frees only its own place
    time.sleep(0.2)
    thread, got = asked(raw)
    time.sleep(0.2)
    assert not got
    first.hang_up()
    assert third.next() == "held"
    third.hang_up()
    thread.join(10)
    assert got == [200]


def test_who_gives_up_waiting_holds_up_nobody(lent, script):
    engine, path, _ = lent
    long = Halted(engine, "a b", max_tokens=50)
    lease = Lease(path)
    assert lease.next() == "waiting"
    lease.hang_up()
    script.eventually(lambda: not engine.ownership.holds_admission)
    begun = []  # what the long answer has told by then
    short = Running(engine, "a b", max_tokens=2, seen=lambda event: begun.append(len(long.told)))
    long.go()
    assert short.result()["finish_reason"] == "length"
    long.result()
    assert begun[-1] < len(long.told), "it starts beside the row that the lease had waited for"


def test_a_drain_takes_leases_back_ends_what_runs_and_refuses_the_rest(lent, script):
    engine, path, raw = lent
    lease = held(path)
    queued, got = asked(raw, tokens=3)
    script.eventually(lambda: engine.stats()["rows"]["open_requests"] == 1)
    status, _, reply = script.Raw(path=str(path)).call("POST", "/admin/drain")
    report = json.loads(reply)
    assert (status, report["drained"], report["flush"]["durable"]) == (200, True, False)
    assert lease.next() == "over" and lease.next() == "closed"
    queued.join(10)
    assert got == [200]
    assert raw.call("POST", COMPLETE, b'{"prompt": "a"}')[0] == 503
    assert raw.call("GET", "/ready")[0] == 503 and raw.call("GET", "/health")[0] == 200
    with_it = SocketConnection(path, timeout=10)
    with_it.request("POST", "/admin/lease")
    assert json.loads(with_it.getresponse().readline())["lease"] in ("waiting", "over")
    with_it.close()


def test_the_engine_closes_under_a_lease(lent):
    engine, path, _ = lent
    lease = held(path)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3
    assert lease.next() == "over"


def test_leases_of_an_engine_in_another_process(lent, script):
    """By the names that both sides know; the end of that process is the end of its leases."""
    engine, _, _ = lent

    def ask(call: str, /, **args: str) -> object:
        return calls(engine)[call](**args)

    lent = True
    leases = FarLeases(ask, lambda: lent)
    leases.take("a")
    script.eventually(lambda: leases.state("a") == "held")
    leases.release("a")
    assert leases.state("a") == "over"
    leases.take("b")
    script.eventually(lambda: leases.state("b") == "held")
    lent = False  # that process does not hear of the drain
    assert leases.state("b") == "over"
    leases.release("b")

    def ended(*_: object, **__: object) -> None:
        raise ClosedError("the process has ended")

    gone = FarLeases(ended, lambda: True)
    assert gone.state("a") == "over"
    gone.release("a")


@pytest.mark.parametrize("path", ["/admin/drain", "/admin/lease", "/admin/cache/flush"])
def test_not_at_the_port(raw, engine, path):
    assert raw.call("POST", path)[0] == 403
    assert engine.state == "open"
