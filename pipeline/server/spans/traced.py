"""One span a request of a family that generates, in the words of the GenAI semantic conventions.

A middleware: it looks at the answer's books when the last byte is out, so that nothing is done for it
while tokens come, and nothing at all where it is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.server.answer import Answer
from pipeline.server.endpoint import ANSWER, WRITER
from pipeline.server.errors import ClientGone, describe
from pipeline.server.spans.words import asked_for, contents, outcome

OPERATIONS = {"/v1/completions": "text_completion"}  # all others are chats


class Traced:
    """Begins where the request's `traceparent` says. `content`: prompts and answers are recorded."""

    def __init__(self, app: ASGIApp, provider: TracerProvider, paths: Iterable[str], content: bool):
        self._app, self._paths, self._content = app, frozenset(paths), content
        self._tracer = provider.get_tracer("headrace")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        span = self._begin(scope)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            fail(span, error)
            raise
        finally:
            self._end(span, scope)

    def _begin(self, scope: Scope) -> Span:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        operation = OPERATIONS.get(scope["path"], "chat")
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headrace",
            "http.request.method": scope["method"],
            "url.path": scope["path"],
        }
        parent = propagate.extract(headers)
        kind = SpanKind.SERVER
        return self._tracer.start_span(operation, parent, kind=kind, attributes=attributes)

    def _end(self, span: Span, scope: Scope) -> None:
        answer: Answer | None = scope.get(ANSWER)
        if answer is not None and span.is_recording():
            model = answer.model
            voices = scope[WRITER].voices if WRITER in scope else ()
            span.update_name(f"{OPERATIONS.get(scope['path'], 'chat')} {model}")
            span.set_attributes(asked_for(answer.asked, model))
            span.set_attributes(outcome(answer, voices))
            _events(span, answer)
            if answer.error is not None:
                fail(span, answer.error)
            if self._content:
                span.set_attributes(contents(answer, voices))
        span.end()


def fail(span: Span, error: Exception) -> None:
    """Only what the client is told too: our messages repeat no value, others' stay in the log. Who leaves
    or asks for something wrong is no fault of the server."""
    if isinstance(error, ClientGone):
        span.set_attribute("http.response.status_code", 499)
        return
    fault = describe(error)
    span.set_attribute("error.type", fault.code or str(fault.status))
    span.set_attribute("http.response.status_code", fault.status)
    if fault.status >= 500:
        span.set_status(Status(StatusCode.ERROR, fault.message))


def _events(span: Span, answer: Answer) -> None:
    """When each choice was admitted, started, spoke first and ended; and how long it was in each stage:
    stages take turns, so theirs are sums, told at the end."""
    zero = time.time_ns() - time.perf_counter_ns()

    def tell(name: str, at: float, **more: Any) -> None:
        attributes = {f"headrace.{key}": value for key, value in more.items()}
        span.add_event(name, attributes, zero + round(at * 1e9))

    for index, choice in enumerate(answer.choices):
        timings = dict(choice.done.timings) if choice.done else {}
        if choice.admitted:
            tell("admitted", choice.admitted, choice=index, prompt_tokens=choice.prompt_tokens)
        if "queue" in timings:
            tell("started", choice.submitted + timings["queue"], choice=index)
        if choice.first:
            tell("first_token", choice.first, choice=index)
        if not choice.done:
            continue
        for stage, seconds in timings.items():
            if stage not in ("queue", "ttft", "total"):
                tell("stage", choice.ended, choice=index, stage=stage, seconds=seconds)
        tell("finished", choice.ended, choice=index, reason=choice.done.finish_reason)
