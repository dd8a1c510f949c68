"""Answers of a given form over HTTP, under the names that clients use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import pipeline
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ab", "cd"]}, "many": {"type": "boolean"}},
    "required": ["kind", "many"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    overrides = ("constraint=llguidance", "flow=speculative", "drafter=grammar")
    with (
        pipeline.load("fake", *overrides) as engine,
        serve_in_thread(engine, ServerSettings()) as base,
        openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def answer(client: openai.OpenAI, **extra: Any) -> str:
    reply = client.chat.completions.create(**ASK, max_tokens=2000, extra_body=extra)
    assert reply.choices[0].finish_reason == "stop"
    return reply.choices[0].message.content or ""


def test_a_schema_whole_and_streamed(client):
    whole = client.chat.completions.create(**ASK, response_format=FORMAT, max_tokens=2000)
    value = json.loads(whole.choices[0].message.content)
    assert value["kind"] in ("ab", "cd")
    assert type(value["many"]) is bool
    chunks = client.chat.completions.create(
        **ASK, response_format=FORMAT, max_tokens=2000, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "q" [0-9] "q"'}, "q[0-9]q"),
        ({"grammar": 'root ::= "q" [0-9] "q"', "guided_regex": "z"}, "q[0-9]q"),
        ({"guided_json": SCHEMA}, r"\{.*\}"),
        ({"guided_json": json.dumps(SCHEMA), "guided_regex": "z"}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[a-c]{4}"}, "guided_regex": "z"}, "[a-c]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            r'\{"kind":"(ab|cd)","many":(true|false)\}',
        ),
        ({"response_format": {"type": "text"}, "guided_regex": "z{3}"}, "z{3}"),
    ],
)
def test_every_name_for_it(client, fields, wanted):
    assert re.fullmatch(wanted, answer(client, **fields), re.DOTALL)


def test_raw_completions_too(client):
    reply = client.completions.create(
        model="m", prompt="x", max_tokens=20, extra_body={"guided_regex": "[x-z]{5}"}
    )
    assert re.fullmatch("[x-z]{5}", reply.choices[0].text)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": ["json_object"]}}, "response_format"),
        ({"response_format": 5}, "response_format"),
        ({"guided_json": 7}, "guided_json"),
        ({"guided_json": {"type": "nope"}}, "guided_json"),
        ({"guided_regex": "(["}, "guided_regex"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_is_a_400_naming_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, max_tokens=4, extra_body=fields)
    assert caught.value.param == param
