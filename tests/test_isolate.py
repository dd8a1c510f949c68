"""`server.isolate=true`: real processes, killed for real, and every client gets a defined end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support import serving
from toy_served import Served

from pipeline.errors import ClosedError
from pipeline.isolate.engine import IsolatedEngine
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.types import Done, Failed, Request

ROOT = Path(__file__).parents[1]
SLOW = ("model.layers=2", "model.delay_ms=12", "drafter=none", "limits.max_rows=8")
RESUMABLE = (
    "flow=resumable", "tier=[ram,disk]", "tier.disk.reserve_gb=0",
    "stage.progress_capture.checkpoint_tokens=8",
)  # fmt: skip
PROMPTS = [f"row {'abcdefgh'[n] * (3 + 5 * n)}" for n in range(8)]
TOKENS = 160  # two seconds of it, so that there is something to kill on a busy machine


class Serving:
    """`headrace serve fake …` as a user starts it."""

    def __init__(self, *overrides: str, isolate: bool = True):
        words = ["serve", "fake", "server.port=0", f"server.isolate={isolate}".lower(), *overrides]
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.log: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        line = next((line for line in self.process.stdout if " serves " in line), "")
        assert line, self.log
        self.start_s = time.monotonic() - began
        self.process.stdout.close()  # nobody reads on: no later process may mind
        self.address = urlsplit(line.split()[-1]).netloc

    def _listen(self):
        self.log.extend(iter(self.process.stderr.readline, ""))

    def call(self, method, path, body=None, timeout=60):
        """Status, headers, body."""
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()

    def get(self, path):
        status, _, data = self.call("GET", path)
        return status, json.loads(data)

    @property
    def child(self):
        return self.get("/health")[1]["isolate"]["pid"]

    def until_ready(self):
        """Within two seconds of what it takes to load the model."""
        until = time.monotonic() + self.start_s + 2
        while self.get("/ready")[0] != 200:
            assert time.monotonic() < until, self.log
            time.sleep(0.02)


@contextlib.contextmanager
def served(*overrides, **more):
    server = Serving(*overrides, **more)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def gone(pid, within_s=5):
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


class Client(threading.Thread):
    """One request, and what its client sees."""

    def __init__(self, server, prompt, *, stream=True, **more):
        super().__init__(daemon=True)
        self.server = server
        self.body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        self.body |= {"stream": stream, "stream_options": {"include_usage": True}, **more}
        if not stream:
            del self.body["stream_options"]
        self.text, self.events, self.status, self.usage = "", [], 0, {}
        self.seed, self.retry_after = None, None
        self.start()

    def run(self):
        connection = http.client.HTTPConnection(self.server.address, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(self.body))
            reply = connection.getresponse()
            self.status, self.retry_after = reply.status, reply.getheader("retry-after")
            if not self.body["stream"]:
                self._hear(json.load(reply))
                return
            for line in reply:
                if line.startswith(b"data: "):
                    self._hear(line[6:].strip())

    def _hear(self, said):
        if said == b"[DONE]":
            self.events.append("[DONE]")
            return
        said = json.loads(said) if isinstance(said, bytes) else said
        self.events.append(said)
        self.usage = said.get("usage") or self.usage
        for choice in said.get("choices", ()):
            self.text += choice["text"]
            self.seed = choice.get("headrace", {}).get("seed", self.seed)

    def ended(self):
        self.join(60)
        assert not self.is_alive(), "it never ended"
        return self


def speaking(clients, letters):
    until = time.monotonic() + 30
    while min(len(client.text) for client in clients) < letters:
        assert time.monotonic() < until, [client.text for client in clients]
        time.sleep(0.002)


def whole(server, prompt, **more):
    return Client(server, prompt, stream=False, **more).ended()


def test_a_kill_during_eight_streams():
    with served(*SLOW) as server:
        before = whole(server, PROMPTS[0]).text
        child = server.child
        clients = [Client(server, prompt) for prompt in PROMPTS]
        speaking(clients, 1)
        waiting = [Client(server, prompt, stream=False) for prompt in PROMPTS[:2]]
        speaking(clients, 10)
        os.kill(child, signal.SIGKILL)
        for client in clients:
            client.ended()
            assert client.status == 200
            assert 10 <= len(client.text) < TOKENS
            assert client.events[-1]["error"]["code"] == "engine_closed"
            assert "SIGKILL" in client.events[-1]["error"]["message"]
            assert "[DONE]" not in client.events, "it does not look complete"
            assert not any(
                c.get("finish_reason") for e in client.events for c in e.get("choices", ())
            )
        for client in waiting:
            assert client.ended().status == 503
            assert int(client.retry_after) >= 1
        status, health = server.get("/health")
        assert (status, health["status"], health["state"]) == (200, "ok", "restarting")
        assert server.get("/ready")[0] == 503
        refused = whole(server, "x")
        assert (refused.status, refused.events[0]["error"]["code"]) == (503, "engine_closed")
        assert int(refused.retry_after) >= 1
        assert server.call("POST", "/tokenize", {"prompt": "x"})[0] == 503
        assert server.get("/stats")[0] == 200
        server.until_ready()
        assert whole(server, PROMPTS[0]).text == before
        told = server.get("/stats")[1]["isolate"]
        assert told["pid"] != child
        assert (told["restarts"], told["requests_lost"], told["last_end"]) == (
            1,
            10,
            "signal SIGKILL",
        )
        _only_the_child_has_mlx(server)


def _only_the_child_has_mlx(server):
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, server.child)]
    assert ["libmlx" in text for text in maps] == [False, True]


def test_resumable_answers_go_on_as_if_nothing_had_happened(tmp_path):
    """Greedy, and sampled by seeds that the server drew, which nobody but it knows."""
    with served(*SLOW, *RESUMABLE, f"tier.disk.path={tmp_path}") as server:
        expected = [Client(server, prompt, stream=False) for prompt in PROMPTS[:4]]
        expected = [client.ended().text for client in expected]
        clients = [Client(server, prompt) for prompt in PROMPTS[:4]]
        clients += [Client(server, prompt, temperature=1.0) for prompt in PROMPTS[4:7]]
        clients += [Client(server, PROMPTS[4], temperature=1.0)]  # equal to one of them
        speaking(clients, 1)
        late = Client(server, PROMPTS[7], stream=False)  # in the queue
        speaking(clients, 20)
        assert len(clients) == 8
        os.kill(server.child, signal.SIGKILL)
        assert server.get("/health")[0] == 200
        server.until_ready()
        for client in clients:
            client.ended()
            assert client.events[-1] == "[DONE]"
            assert client.usage["completion_tokens"] == TOKENS
        assert [client.text for client in clients[:4]] == expected
        assert any(client.usage["resumed_tokens"] for client in clients)
        assert late.ended().status == 200
        same = [
            Client(server, client.body["prompt"], stream=False, temperature=1.0, seed=client.seed)
            for client in clients[4:]
        ]
        assert [client.ended().text for client in same] == [client.text for client in clients[4:]]
        told = server.get("/stats")[1]["isolate"]
        assert (told["restarts"], told["requests_lost"]) == (1, 0)
        assert told["requests_asked_again"] >= 8


@pytest.mark.parametrize(
    "overrides",
    [
        ("limits.max_row=3", "kvv=kv8", "server.port=x"),
        ("model=local", "model.path=/nowhere"),
    ],
    ids=["keys", "weights"],
)
def test_what_keeps_it_from_starting_is_told_alike(overrides):
    def started(isolate):
        words = ["serve", "fake", "server.port=0", f"server.isolate={isolate}", *overrides]
        ran = subprocess.run(
            [sys.executable, "-m", "pipeline", *words], capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return ran.returncode, ran.stdout, ran.stderr

    apart, together = started("true"), started("false")
    assert apart == together
    assert (apart[0], apart[2][:6]) == (2, "error:")


def test_the_child_dies_with_its_parent():
    with served() as server:
        child = server.child
        os.kill(server.process.pid, signal.SIGKILL)
        assert gone(child)


def all_answer(server, questions):
    """Each on a thread of its own; their statuses, once all are there."""
    found = {}

    def ask(at, path, body):
        found[at] = server.call("POST", path, body)[0] if body else server.call("GET", path)[0]

    threads = [
        threading.Thread(target=ask, args=(at, *question)) for at, question in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    return threads, found


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
QUESTIONS = [
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "guided_json": {"type": "object"}}),
    ("/v1/completions", {"prompt": [65, 66], "echo": True, "logprobs": 2, "max_tokens": 3}),
    ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", {"tokens": [65]}),
    *[("/stats", None)] * 6, ("/metrics", None),
]  # fmt: skip


def test_a_process_that_is_stopped_holds_up_nobody_but_its_answers():
    with served(*SLOW, "constraint=llguidance") as server:
        child = server.child
        streams = [Client(server, prompt, logprobs=2) for prompt in PROMPTS]
        speaking(streams, 1)
        os.kill(child, signal.SIGSTOP)
        try:
            waiting, found = all_answer(server, QUESTIONS)
            took = []
            for _ in range(60):
                began = time.monotonic()
                assert server.get("/health")[0] == 200
                took.append(time.monotonic() - began)
                time.sleep(0.02)
            assert not found, "it is stopped"
        finally:
            os.kill(child, signal.SIGCONT)
        took.sort()
        assert took[-6] < 0.2 and took[-1] < 1, took  # a test's machine may be busy
        for thread in waiting:
            thread.join(30)
        assert list(found.values()) == [200] * len(QUESTIONS)
        assert all(stream.ended().events[-1] == "[DONE]" for stream in streams)
        assert server.child == child


def test_sigterm_drains_and_flushes(tmp_path):
    """It reaches the whole group, as from a terminal or a service manager."""
    kept = ("tier=[ram,disk]", f"tier.disk.path={tmp_path}", "tier.disk.reserve_gb=0")
    slow_to_write = ("stage.spill.debounce_s=60", "tier.ram.entry_bytes=1")
    with served(*SLOW, *kept, *slow_to_write) as server:
        client, child = Client(server, PROMPTS[7]), server.child
        speaking([client], 5)
        os.kill(child, signal.SIGTERM)
        os.kill(server.process.pid, signal.SIGTERM)
        client.ended()
        assert client.events[-1] == "[DONE]" and len(client.text) == TOKENS
        assert server.process.wait(20) == 0
        assert gone(child)
        assert list(tmp_path.rglob("*.safetensors")), "what was computed is on disk"
        assert not any("Traceback" in line for line in server.log), server.log


# --- in this process: the server's half is a library too


@contextlib.contextmanager
def isolated(*overrides, **more):
    engine = IsolatedEngine(Served.of(*overrides, **more))
    engine.open()
    try:
        yield engine
    finally:
        engine.close()


def until(check, timeout_s=20):
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("pipeline.isolate.patience.FIRST_S", 0.01)


def test_patience_ends(tmp_path, soon):
    flag = tmp_path / "flag"
    with isolated("server.restarts=2", flag=flag) as engine:
        flag.touch()
        os.kill(engine.health()["isolate"]["pid"], signal.SIGKILL)
        until(lambda: engine.health()["state"] == "failed")
        assert engine.health()["status"] == "failed"
        assert engine.health()["isolate"]["restarts"] == 2
        assert engine.health()["isolate"]["last_end"] == "exit code 7"
        with pytest.raises(ClosedError, match="failed"):
            engine.submit(None, print)


def test_one_that_dies_while_it_opens_is_told(tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    with (
        pytest.raises(ValueError, match="ended while it opened: exit code 7"),
        isolated(flag=flag),
    ):
        pass


def test_an_engine_whose_thread_fails_is_started_again(tmp_path):
    fault, events = tmp_path / "fault", []
    with isolated("model.delay_ms=5", fault=fault) as engine:
        engine.submit(Request("a", text="x", max_tokens=5000, ignore_eos=True), events.append)
        until(lambda: len(events) > 3)
        fault.touch()
        until(lambda: isinstance(events[-1], Failed))
        assert "ended (exit code 1)" in str(events[-1].error)
        until(lambda: engine.health()["state"] == "open")
        assert engine.health()["isolate"]["restarts"] == 1


def test_a_process_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("pipeline.isolate.engine.CLOSE_S", 0.2)
    with isolated() as engine:
        pid = engine.health()["isolate"]["pid"]
        os.kill(pid, signal.SIGSTOP)
    assert gone(pid)
    assert engine.health()["state"] == "closed"


HANGS = "server.hang_s=4"


def test_a_stopped_process_is_ended_and_another_one_started():
    events = []
    with isolated("model.delay_ms=5", HANGS) as engine:
        engine.submit(Request("a", text="x", max_tokens=9999, ignore_eos=True), events.append)
        until(lambda: len(events) > 3)
        os.kill(engine.health()["isolate"]["pid"], signal.SIGSTOP)
        until(lambda: isinstance(events[-1], Failed))
        assert "no sign of life for 4 s" in str(events[-1].error)
        until(lambda: engine.health()["state"] == "open")
        assert "no sign of life" in engine.health()["isolate"]["last_end"]
        assert engine.tokenizer.encode("a")


def test_an_engine_s_thread_that_is_stuck_is_found_and_one_that_is_slow_or_idle_is_not(tmp_path):
    stuck, events = tmp_path / "stuck", []
    with isolated("model.delay_ms=600", HANGS, stuck=stuck) as engine:
        time.sleep(4.5)
        engine.submit(Request("a", text="x", max_tokens=4, ignore_eos=True), events.append)
        until(lambda: events and isinstance(events[-1], Done))
        assert engine.health()["isolate"]["restarts"] == 0
        stuck.touch()
        engine.submit(Request("b", text="x", max_tokens=4, ignore_eos=True), events.append)
        until(lambda: isinstance(events[-1], Failed))
        assert "no sign of life" in str(events[-1].error)


def test_who_holds_a_lease_for_long_is_not_taken_for_stuck():
    with isolated(HANGS) as engine:
        engine.leases.take("a")
        until(lambda: engine.leases.state("a") == "held")
        time.sleep(5.5)
        assert engine.leases.state("a") == "held"
        assert engine.health()["isolate"]["restarts"] == 0
        engine.leases.release("a")


def test_flushes_that_wait_keep_no_text_from_being_tokenized(tmp_path):
    kept = ("tier=[ram,disk]", f"tier.disk.path={tmp_path}", "tier.disk.reserve_gb=0")
    with isolated("model.delay_ms=20", *kept) as engine:
        events, reports = [], []
        ticket = engine.submit(
            Request("a", text="x", max_tokens=9999, ignore_eos=True), events.append
        )
        until(lambda: len(events) > 3)
        flushes = [
            threading.Thread(target=lambda: reports.append(engine.flush(4.0))) for _ in range(8)
        ]
        for flush in flushes:
            flush.start()
        time.sleep(0.2)
        assert engine.tokenizer.encode("a")
        assert not reports, "it is answered meanwhile"
        ticket.cancel()
        for flush in flushes:
            flush.join()
        assert all(report["durable"] for report in reports)


def test_a_question_that_ends_its_process_is_not_asked_for_ever(tmp_path, soon):
    with isolated(*RESUMABLE, f"tier.disk.path={tmp_path}") as engine:
        with pytest.raises(ClosedError, match="exit code 7"):
            engine.tokenizer.dialect.calls("deadly", [])
        until(lambda: engine.health()["state"] == "open")
        assert engine.health()["isolate"]["restarts"] == 3


@pytest.mark.parametrize("resumable", [True, False])
def test_what_is_asked_about_an_answer_on_its_way_is_asked_of_the_next_process(resumable, tmp_path):
    flow = (*RESUMABLE, f"tier.disk.path={tmp_path}") if resumable else ()
    with isolated(*flow) as engine:
        dialect = engine.tokenizer.dialect
        os.kill(engine.health()["isolate"]["pid"], signal.SIGKILL)
        until(lambda: engine.health()["state"] == "restarting")
        outcome = contextlib.nullcontext() if resumable else pytest.raises(ClosedError)
        with outcome:
            assert dialect.calls('{"name": "f", "arguments": {}}', [])[0].name == "f"


def test_nothing_is_asked_on_an_event_loop():
    async def ask():
        return engine.tokenizer.encode("a")

    with isolated() as engine, pytest.raises(AssertionError, match="event loop"):
        asyncio.run(ask())


def test_an_event_that_cannot_cross_is_its_row_s_error_and_nobody_else_s(tmp_path):
    odd, lost, events = tmp_path / "odd", [], []
    with isolated("model.delay_ms=5", odd=odd) as engine:
        long = {"text": "x", "max_tokens": 200, "ignore_eos": True}
        engine.submit(Request("a", **long), events.append)
        until(lambda: len(events) > 3)
        odd.touch()
        engine.submit(Request("odd", **long), lost.append)
        until(lambda: lost and isinstance(lost[-1], Failed))
        until(lambda: isinstance(events[-1], Done))
        assert "int64" in str(lost[-1].error)
        assert engine.health()["isolate"]["restarts"] == 0
        until(lambda: engine.stats()["rows"]["open_requests"] == 0)
        assert engine.stats()["counts"]["requests_cancelled"] == 1


def test_an_end_while_it_is_started_again():
    with isolated() as engine:
        os.kill(engine.health()["isolate"]["pid"], signal.SIGKILL)
        until(lambda: engine.health()["state"] == "restarting")
        assert engine.drain(5)
    assert engine.health()["isolate"]["pid"] is None


REQUESTS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True,
                              "top_logprobs": 3, "max_tokens": 6}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 3,
                              "temperature": 1, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20,
                              "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}]}),
    ("/v1/completions", {"prompt": [1, 65, 200], "echo": True, "logprobs": 2, "max_tokens": 3}),
    ("/v1/completions", {"prompt": "x" * 99, "token_origins": True, "max_tokens": 30}),
    ("/v1/completions", {"prompt": "x" * 9000}),
    ("/v1/completions", {"prompt": "x", "guided_regex": "(" }),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/tokenize", {"prompt": "hä", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/detokenize", {"tokens": [104, 105]}),
    ("/admin/cache/flush", {}),
]  # fmt: skip
VARYING = {"id", "created", "timings", "seed", "elapsed_s"}


def steady(value):
    """A reply without what is another one each time."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in VARYING}
    return [steady(item) for item in value] if isinstance(value, list) else value


def test_a_client_cannot_tell_the_difference():
    """Replies are equal but for names and times, errors too."""
    overrides = ("drafter=ngram", "constraint=llguidance", "tier=ram")

    def replies(engine):
        with serve_in_thread(engine, ServerSettings()) as base:
            server = object.__new__(Serving)
            server.address = urlsplit(base).netloc
            found = [server.call("POST", path, body) for path, body in REQUESTS]
            found.append(server.call("DELETE", "/v1/sessions/a/b"))
            assert b"headrace_engine_rows_max" in server.call("GET", "/metrics")[2]
            return [(status, steady(json.loads(data or b"null"))) for status, _, data in found]

    with isolated(*overrides) as engine:
        apart = replies(engine)
    with serving(*overrides, recipe="fake") as engine:
        together = replies(engine)
    for (path, _), one, other in zip(REQUESTS, apart, together, strict=False):
        assert one == other, path
    assert apart == together


def test_a_full_queue_and_a_client_that_leaves():
    few = ("limits.max_rows=1", "limits.max_queue=1", "model.delay_ms=20", "drafter=none")
    body = {"prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True}
    with isolated(*few) as engine, serve_in_thread(engine, ServerSettings()) as base:
        server = object.__new__(Serving)
        server.address = urlsplit(base).netloc
        leaving = http.client.HTTPConnection(server.address, timeout=10)
        leaving.request("POST", "/v1/completions", json.dumps(body))
        reply = leaving.getresponse()
        staying = Client(server, "y", max_tokens=20)
        until(lambda: engine.stats()["rows"]["open_requests"] == 2)
        refused = whole(server, "z")
        assert (refused.status, refused.events[0]["error"]["code"]) == (429, "queue_full")
        reply.close()
        leaving.close()
        assert len(staying.ended().text) == 20
        until(lambda: engine.stats()["rows"]["open_requests"] == 0)
        assert engine.stats()["counts"]["requests_cancelled"] == 1


def test_what_cannot_cross_is_its_caller_s_error_and_nobody_else_s():
    with isolated() as engine:
        events = []
        engine.submit(Request("x", text="\ud800"), events.append)
        until(lambda: events)
        assert isinstance(events[0].error, ValueError) and "surrogates" in str(events[0].error)
        with pytest.raises(ValueError, match="surrogates"):
            engine.tokenizer.encode("\ud800")
        assert engine.tokenizer.encode("a") and not engine._flights and not engine._calls
