"""Whatever fits our own OpenAPI document, and much that does not, finds no fault of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

import pipeline
from pipeline.server.openapi import BODIES
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))  # a request each, a path and mode
FEW = ("constraint=llguidance", "model.context=400", "limits.max_tokens=8", "limits.max_rows=4")


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with (
        pipeline.load("fake", *FEW) as engine,
        serve_in_thread(engine, ServerSettings(max_body_bytes=1 << 16)) as base,
    ):
        yield base


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", BODIES)
def test_no_request_is_our_fault(base, path, mode):
    described = schemathesis.openapi.from_url(base + "/openapi.json")
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(described[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=20)

    ask()


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/models/{}"]
)
@pytest.mark.parametrize("name", ["resp_0", "..%2F..%2Fetc%2Fpasswd", "%00", "%ff", "a" * 2000])
def test_no_name_is_our_fault(base, script, method, path, name):
    status, _, _ = script.Raw(base).call(method, path.format(name))
    assert status in (404, 405)


def test_the_document_names_every_endpoint(base, script):
    status, _, data = script.Raw(base).call("GET", "/openapi.json")
    document = json.loads(data)
    assert status == 200
    assert document["openapi"] == "3.1.0"
    assert set(BODIES) < set(document["paths"])
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "tools", "stop", "logit_bias", "reasoning_effort"} < set(chat)
