"""Whatever fits our own OpenAPI document, and much that does not, finds no fault of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

import pipeline
from pipeline.server.openapi import BODIES
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

FEW = ("constraint=llguidance", "model.context=400", "limits.max_tokens=8", "limits.max_rows=4")


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with (
        pipeline.load("fake", *FEW) as engine,
        serve_in_thread(engine, ServerSettings(max_body_bytes=1 << 16)) as base,
    ):
        yield base


@pytest.fixture(scope="module")
def described(base):
    return schemathesis.openapi.from_url(base + "/openapi.json")


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_is_our_fault(case):
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    case.call_and_validate(checks=checks, timeout=20)


def test_the_document_names_every_endpoint(base, script):
    status, _, data = script.Raw(base).call("GET", "/openapi.json")
    document = json.loads(data)
    assert status == 200
    assert document["openapi"] == "3.1.0"
    assert set(BODIES) < set(document["paths"])
    chat = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "tools", "stop", "logit_bias", "reasoning_effort"} < set(chat)
