"""Anthropic's API by its official client, and its streams byte by byte."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from pipeline.errors import BusyError
from pipeline.types import Accepted, Delta, Failed

ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TWO = f"<think>\nhm\n</think>\n\nok\n{ONE}"
PATH = "/v1/messages"


def test_whole(engine, anthropic_client, script):
    reply = anthropic_client.messages.create(**ASK)
    assert [block.text for block in reply.content] == [script.TEXT]
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "fake/one")
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 3, 8)
    assert reply.id.startswith("msg_") and reply._request_id == reply.id


def test_request_reaches_the_engine(engine, anthropic_client):
    anthropic_client.messages.create(
        model="m",
        max_tokens=7,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "2", "is_error": True},
                    {"type": "text", "text": "c"},
                ],
            },
        ],
        stop_sequences=["END"],
        metadata={"user_id": "bob"},
        thinking={"type": "disabled"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    (request,) = engine.requests
    function = {"name": "add", "arguments": {"a": 1}}
    assert request.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Error: 2", "name": "add"},
        {"role": "user", "content": "c"},
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (request.max_tokens, request.stop, request.client) == (7, ("END",), "bob")
    assert request.template_args == {"enable_thinking": False}


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_streamed_equals_whole(engine, anthropic_client, script, size):
    engine.plan = script.saying(TWO, size)
    whole = anthropic_client.messages.create(**ASK, tools=[ADD])
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[2].input == {"a": 1, "b": 2}
    assert whole.stop_reason == "tool_use"
    with anthropic_client.messages.stream(**ASK, tools=[ADD]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "ok"
    assert final.stop_reason == "tool_use"
    plain = [
        [{k: v for k, v in block.model_dump().items() if k != "id"} for block in message.content]
        for message in (whole, final)
    ]
    assert plain[0] == plain[1]
    whole_usage = whole.usage.model_dump()
    assert (
        whole_usage.pop("resumed_tokens") == 0
    )  # the client's stream drops names it does not know
    assert final.usage.model_dump() == whole_usage
    assert final.content[2].id.startswith("toolu_")


def test_a_stream_byte_by_byte(engine, raw, script):
    engine.plan = script.saying(TWO, 1000)
    lines = raw.events(PATH, {**ASK, "tools": [ADD], "stream": True})
    names = [line.removeprefix("event: ") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in data]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block * 3, "message_delta", "message_stop"]
    start = data[0]["message"]
    assert start.pop("id").startswith("msg_")
    assert start == {
        "type": "message", "role": "assistant", "model": "fake/one", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": 0},
    }  # fmt: skip
    assert [event.get("index") for event in data[1:-2]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert data[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert data[2]["delta"] == {"type": "thinking_delta", "thinking": "hm"}
    assert data[5]["delta"] == {"type": "text_delta", "text": "ok"}
    assert data[7]["content_block"]["input"] == {}
    assert data[8]["delta"] == {"type": "input_json_delta", "partial_json": '{"a": 1, "b": 2}'}
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert data[-2]["usage"] == {
        "input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3,
        "output_tokens": len(TWO), "resumed_tokens": 0,
    }  # fmt: skip
    assert data[-1] == {"type": "message_stop"}


def test_how_it_stopped(engine, anthropic_client, script):
    engine.plan = script.saying("ab", stop_string="END")
    reply = anthropic_client.messages.create(**ASK, stop_sequences=["END"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
    engine.plan = script.saying("ab", finish_reason="length")
    assert anthropic_client.messages.create(**ASK).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "named"),
    [({"type": "any"}, True), ({"type": "tool", "name": "add"}, True), ({"type": "auto"}, False)],
)
def test_tool_choice(engine, anthropic_client, script, choice, named):
    engine.plan = script.saying(ONE)
    anthropic_client.messages.create(**ASK, tools=[ADD], tool_choice=choice)
    assert (engine.requests[0].grammar is not None) == named


def test_structured_output_is_parsed(engine, anthropic_client, script):
    class Place(BaseModel):
        name: str

    engine.plan = script.saying('{"name": "Paris"}')
    reply = anthropic_client.messages.parse(**ASK, output_format=Place)
    assert reply.parsed_output == Place(name="Paris")
    assert engine.requests[0].grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice.name"),
        ({"container": {"id": "x"}}, "container"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: Its type"),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_told_in_anthropics_words(engine, raw, fields, word):
    status, _, reply = raw.post(PATH, {**ASK, **fields})
    assert (status, reply["type"]) == (400, "error")
    assert reply["error"]["type"] == "invalid_request_error"
    assert word in reply["error"]["message"]
    assert not engine.requests


def test_errors_raise_the_clients_own(engine, anthropic_client):
    engine.room = 0
    with pytest.raises(anthropic.RateLimitError):
        anthropic_client.messages.create(**ASK)
    engine.room = 1000
    engine.plan = lambda _: [Accepted(1), Delta("a", (1,)), 0.3, Failed(BusyError("secret"))]
    with pytest.raises(anthropic.APIStatusError), anthropic_client.messages.stream(**ASK) as stream:
        list(stream)


def test_tokens_are_counted(engine, anthropic_client):
    counted = anthropic_client.messages.count_tokens(model="m", messages=ASK["messages"])
    assert counted.input_tokens == 3
    assert not engine.requests


@pytest.mark.parametrize("levels", [90, 900, 100_000])
def test_a_call_whose_arguments_nobody_could_read(engine, raw, script, levels):
    arguments = '{"a": ' + "[" * levels + "]" * levels + "}"
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    engine.plan = script.saying(call, 10_000)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    status, _, message = raw.post("/v1/messages", body)
    assert status == 200
    assert list(message["content"][0]["input"]) == (["a"] if levels < 100 else [])
