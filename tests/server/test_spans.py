"""One OpenTelemetry span a request, taken from the in-memory exporter."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import pipeline
from pipeline.errors import OpenError, RequestError
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings
from pipeline.server.spans.provider import Tracing
from pipeline.trace import Telemetry
from pipeline.types import Accepted, Failed

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "a secret"}], "model": "mine"}


class Watched:
    """A server over a scripted engine, and the spans of its requests."""

    def __init__(self, script, base, exporter):
        self.engine, self.base, self.exporter = script, base, exporter

    def __call__(self, path, body, **headers):
        return self.raw.call("POST", path, json.dumps(body).encode(), **headers)

    def span(self, eventually):
        """The last request's; it ends just after the reply's last byte."""
        eventually(self.exporter.get_finished_spans)
        (span,) = self.exporter.get_finished_spans()
        return span


def watching(script, *, content=False):
    exporter, provider, engine = InMemorySpanExporter(), TracerProvider(), script.Engine()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ServerSettings(max_choices=8, shutdown_s=1)
    return serve_in_thread(engine, settings, Tracing(provider, content)), engine, exporter


@pytest.fixture
def watched(script):
    serving, engine, exporter = watching(script)
    with serving as base:
        found = Watched(engine, base, exporter)
        found.raw = script.Raw(base)
        yield found


def test_a_chat(watched, script):
    began = time.time_ns()
    watched(CHAT, {**ASK, "temperature": 0.5, "seed": 3, "stop": "END", "session_id": "s1"})
    span = watched.span(script.eventually)
    assert (span.name, span.kind, span.parent) == ("chat fake/one", SpanKind.SERVER, None)
    said = dict(span.attributes)
    assert said.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk") < 10
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "mine",
        "gen_ai.response.model": "fake/one",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.conversation.id": "s1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "headrace.usage.resumed_tokens": 0,
        "headrace.speculation.drafted_tokens": 3,
        "headrace.speculation.accepted_tokens": 1,
        "headrace.speculation.acceptance": 1 / 3,
        "headrace.outcome": "stop",
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert "secret" not in span.to_json()
    times = [(event.name, event.timestamp) for event in span.events]
    assert [name for name, _ in times] == ["admitted", "first_token", "finished"]
    stamps = [began, span.start_time, *(at for _, at in times), span.end_time, time.time_ns()]
    assert all(b - a > -2e6 for a, b in pairwise(stamps)), stamps


def test_choices_of_a_stream(watched, script):
    watched(TEXT, {"prompt": "a secret", "n": 2, "stream": True})
    span = watched.span(script.eventually)
    assert span.name == "text_completion fake/one"
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.usage.input_tokens"] == 5  # prefilled once
    assert span.attributes["gen_ai.usage.output_tokens"] == 16
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    ended = [e.attributes["headrace.choice"] for e in span.events if e.name == "finished"]
    assert sorted(ended) == [0, 1]


def test_the_caller_s_trace_goes_on(watched, script):
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    watched(CHAT, ASK, traceparent=f"00-{trace}-{caller}-01")
    span = watched.span(script.eventually)
    assert f"{span.context.trace_id:032x}" == trace
    assert f"{span.parent.span_id:016x}" == caller


@pytest.mark.parametrize(
    ("body", "status", "kind", "failed"),
    [
        ({"messages": []}, 400, "invalid_value", False),
        ({**ASK, "messages": [{"role": "user", "content": "fail"}]}, 500, "internal_error", True),
    ],
    ids=["refused", "failed"],
)
def test_what_goes_wrong(watched, script, body, status, kind, failed):
    if failed:
        watched.engine.plan = lambda request: iter([Failed(RuntimeError("secret detail"))])
    assert watched(CHAT, body)[0] == status
    span = watched.span(script.eventually)
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["error.type"] == kind
    assert span.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert "secret" not in span.to_json()


def test_admission_refuses(watched, script):
    refusal = RequestError("prompt: too long", param="prompt", code="context_length_exceeded")
    watched.engine.plan = lambda request: iter([Failed(refusal)])
    watched(CHAT, ASK)
    span = watched.span(script.eventually)
    assert span.attributes["error.type"] == "context_length_exceeded"
    assert span.attributes["headrace.outcome"] == "failed"


def test_a_stream_that_fails_on_the_way(watched, script):
    def plan(request):
        yield from list(script.greeting(request))[:3]
        yield Failed(RuntimeError("secret detail"))

    watched.engine.plan = plan
    watched(CHAT, {**ASK, "stream": True})
    span = watched.span(script.eventually)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("failed",)
    assert span.attributes["error.type"] == "internal_error"
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(watched, script, stream):
    def plan(request):
        yield Accepted(5)
        yield 30.0

    watched.engine.plan = plan
    connection = http.client.HTTPConnection(urlsplit(watched.base).netloc, timeout=10)
    connection.request("POST", CHAT, json.dumps({**ASK, "stream": stream}))
    script.eventually(lambda: watched.engine.active)
    connection.sock.close()
    connection.close()
    span = watched.span(script.eventually)
    assert span.attributes["headrace.outcome"] == "client gone"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("client gone",)
    assert span.attributes["gen_ai.usage.output_tokens"] == 0
    assert span.status.status_code is StatusCode.UNSET


def test_content_where_it_is_asked_for(script):
    serving, _, exporter = watching(script, content=True)
    with serving as base:
        script.Raw(base).post(CHAT, ASK)
        script.eventually(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    heard, spoken = (
        json.loads(span.attributes[f"gen_ai.{side}.messages"]) for side in ("input", "output")
    )
    assert heard == [{"role": "user", "parts": [{"type": "text", "content": "a secret"}]}]
    assert spoken[0]["parts"] == [{"type": "text", "content": script.TEXT}]


def test_stages_of_a_real_engine(script):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        pipeline.load("fake", "drafter=ngram", "flow=speculative") as engine,
        serve_in_thread(engine, ServerSettings(), Tracing(provider)) as base,
    ):
        script.Raw(base).post(TEXT, {"prompt": "abc abc abc abc", "max_tokens": 40})
        script.eventually(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    seconds = {
        event.attributes["headrace.stage"]: event.attributes["headrace.seconds"]
        for event in span.events
        if event.name == "stage"
    }
    assert {"tokenize", "chunked_prefill", "draft", "verify", "accept"} <= set(seconds)
    assert all(value > 0 for value in seconds.values())
    names = [event.name for event in span.events if event.name != "stage"]
    assert names == ["admitted", "started", "first_token", "finished"]
    at = {event.name: event.timestamp for event in span.events}
    assert at["started"] < at["first_token"] < at["finished"]
    assert span.attributes["headrace.speculation.drafted_tokens"] > 0


def test_the_standard_variables_say_where_to(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    tracing = Tracing.of(Telemetry(spans=True))
    assert tracing.provider.resource.attributes["service.name"] == "headrace"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mill")
    assert Tracing.of(Telemetry(spans=True)).provider.resource.attributes["service.name"] == "mill"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nowhere")
    with pytest.raises(OpenError, match="no exporter 'nowhere' is installed"):
        Tracing.of(Telemetry(spans=True))


def test_a_collector_gets_them(tmp_path, monkeypatch):
    """Over OTLP and HTTP, to the recipe's endpoint, when the server ends at the latest."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracing = Tracing.of(
            Telemetry(spans=True, endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces")
        )
        tracing.provider.get_tracer("x").start_span("chat one").end()
        tracing.close()
        collector.shutdown()
    ((path, data),) = got
    assert path == "/v1/traces"
    sent = ExportTraceServiceRequest.FromString(data)
    assert sent.resource_spans[0].scope_spans[0].spans[0].name == "chat one"


def test_nothing_is_imported_for_a_server_without_traces():
    code = (
        "import sys, pipeline.cli.serve_verb, pipeline.server.run;"
        "from pipeline.server.spans.provider import Tracing; from pipeline.trace import Telemetry;"
        "assert Tracing.of(Telemetry()) is None;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=paths).returncode == 0
