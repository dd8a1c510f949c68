"""Tools and reasoning in chats, by the official client: offered, forced, split, streamed."""

from __future__ import annotations

import json
import threading
import time
from copy import copy
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from pipeline.types import ReasoningBudget, ToolCall

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SAY = {"type": "function", "function": {"name": "say"}}
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TWO = f"<think>\nhm\n</think>\n\nok\n{ONE}\n{ONE.replace('1', '7')}"
RAW = "/v1/chat/completions"


def merged(chunks: Any) -> tuple[dict[str, str], list[dict[str, Any]], str]:
    """What a client puts together from a stream: texts by name, calls, how it ended."""
    texts: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks:
        (choice,) = chunk.choices
        for name in ("content", "reasoning_content", "reasoning"):
            texts[name] = texts.get(name, "") + (getattr(choice.delta, name, None) or "")
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
            assert part.index == len(calls) - 1
            calls[-1]["arguments"] += part.function.arguments
        reason = reason or choice.finish_reason
    return texts, calls, reason


def test_calls_and_reasoning_whole(engine, client, script):
    engine.plan = script.saying(TWO)
    reply = client.chat.completions.create(**ASK, tools=[ADD, SAY])
    choice = reply.choices[0]
    message = choice.message
    assert (message.content, message.reasoning_content, message.reasoning) == ("ok", "hm", "hm")
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert [json.loads(call.function.arguments)["a"] for call in message.tool_calls] == [1, 7]
    assert len({call.id for call in message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"
    details = reply.usage.completion_tokens_details
    assert details.reasoning_tokens == len("<think>\nhm\n</think>")
    (request,) = engine.requests
    assert [t["function"]["name"] for t in request.template_args["tools"]] == ["add", "say"]
    assert (request.grammar, request.marks) == (None, True)


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_stream_says_the_same_however_it_is_cut(engine, client, script, size):
    engine.plan = script.saying(TWO, size)
    whole = client.chat.completions.create(**ASK, tools=[ADD]).choices[0].message
    chunks = list(client.chat.completions.create(**ASK, tools=[ADD], stream=True))
    texts, calls, reason = merged(chunks)
    assert texts == {"content": "ok", "reasoning_content": "hm", "reasoning": "hm"}
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls
    ]
    assert reason == "tool_calls"
    assert all(call["id"].startswith("call_") for call in calls)


def test_arguments_come_in_deltas(engine, raw, script):
    """Byte by byte: the call begins once, with its id; its arguments follow as they are written."""
    engine.plan = script.saying(ONE, 16)
    lines = raw.events(RAW, {**ASK, "tools": [ADD], "stream": True})
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]]
    begun = deltas[1]["tool_calls"][0]
    assert begun.pop("id").startswith("call_")
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert begun == {"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}
    pieces = [delta["tool_calls"][0] for delta in deltas[2:-1]]
    assert all(set(piece) == {"index", "function"} for piece in pieces)
    assert deltas[-1] == {}
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert joined == '{"a": 1, "b": 2}'


def test_reading_a_call_holds_up_nobody_else(engine, raw, script, monkeypatch):
    """What reads it may be another process, and that one stuck."""
    dialect, asked = copy(engine.tokenizer.dialect), threading.Event()

    def slow(text, tools):
        asked.set()
        time.sleep(1)
        return [ToolCall("add", '{"a": 7}')]

    dialect.calls = slow
    monkeypatch.setattr(engine.tokenizer, "dialect", dialect)
    engine.plan = script.saying("<tool_call>add: a is 7</tool_call>")
    found: list[str] = []
    body = {**ASK, "tools": [ADD], "stream": True}
    stream = threading.Thread(target=lambda: found.extend(raw.events(RAW, body)))
    stream.start()
    assert asked.wait(5)
    began = time.monotonic()
    assert raw.call("GET", "/health")[0] == 200
    assert time.monotonic() - began < 0.5
    stream.join()
    assert any('"arguments":"{\\"a\\": 7}"' in line for line in found)


def test_an_answer_cut_by_its_limit(engine, client, script):
    engine.plan = script.saying(ONE[:50], finish_reason="length")
    choice = client.chat.completions.create(**ASK, tools=[ADD]).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1, '


def test_without_tools_a_call_is_text_and_with_none_too(engine, client, script):
    engine.plan = script.saying(ONE)
    for more in ({}, {"tools": [ADD], "tool_choice": "none"}):
        message = client.chat.completions.create(**ASK, **more).choices[0].message
        assert (message.content, message.tool_calls) == (ONE, None)
    assert all("tools" not in request.template_args for request in engine.requests)


def test_reasoning_that_the_prompt_has_opened(engine, client, script):
    engine.plan = script.saying("hm</think>yes", inside=True)
    message = client.chat.completions.create(**ASK).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")
    texts, _, _ = merged(client.chat.completions.create(**ASK, stream=True))
    assert (texts["reasoning"], texts["content"]) == ("hm", "yes")


FORCED = [
    ("required", None, ["add", "say"]),
    ({"type": "function", "function": {"name": "say"}}, None, ["say"]),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "add"}}],
            },
        },
        None,
        ["add"],
    ),
]


@pytest.mark.parametrize(("choice", "parallel", "names"), FORCED)
def test_what_is_demanded_becomes_a_grammar(engine, client, script, choice, parallel, names):
    engine.plan = script.saying(ONE)
    more = {} if parallel is None else {"parallel_tool_calls": parallel}
    client.chat.completions.create(**ASK, tools=[ADD, SAY], tool_choice=choice, **more)
    grammar = engine.requests[0].grammar
    wanted = json.loads(grammar.source)
    assert (grammar.kind, wanted["must"], wanted["answer"]) == ("tools", True, None)
    assert [tool["function"]["name"] for tool in wanted["tools"]] == names
    shown = engine.requests[0].template_args["tools"]
    assert [tool["function"]["name"] for tool in shown] == ["add", "say"]


def test_one_call_at_most_ends_a_free_answer_at_its_mark(engine, client, script):
    engine.plan = script.saying(ONE.removesuffix("</tool_call>"), stop_string="</tool_call>")
    reply = client.chat.completions.create(**ASK, tools=[ADD], parallel_tool_calls=False)
    assert engine.requests[0].stop == ("</tool_call>",)
    assert engine.requests[0].grammar is None
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"a": 1, "b": 2}'


def test_strict_tools_bind_a_free_answer_and_templates_do_not_see_it(engine, client, script):
    engine.plan = script.saying("no")

    class add(BaseModel):
        a: int

    client.chat.completions.create(**ASK, tools=[openai.pydantic_function_tool(add), SAY])
    (request,) = engine.requests
    assert request.grammar.field == "tools"
    (one, other) = json.loads(request.grammar.source)["tools"]
    assert one["function"]["strict"] and "strict" not in other["function"]
    assert "strict" not in request.template_args["tools"][0]["function"]


def test_history_reaches_the_template(engine, client):
    calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    client.chat.completions.create(
        model="m",
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": calls, "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "x", "content": [{"type": "text", "text": "2"}]},
        ],
    )
    _, assistant, result = engine.requests[0].messages
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "hm")
    assert result == {"role": "tool", "content": "2", "tool_call_id": "x", "name": "add"}


@pytest.mark.parametrize(
    ("effort", "args", "budget"),
    [
        ("none", {"enable_thinking": False}, None),
        ("low", {"enable_thinking": True}, ReasoningBudget(1024, "reasoning_effort")),
        ("xhigh", {"enable_thinking": True}, None),
    ],
)
def test_effort_in_the_templates_words_or_as_a_budget(engine, client, effort, args, budget):
    raw = client.chat.completions.with_raw_response
    reply = raw.create(**ASK, reasoning_effort=effort)
    assert engine.requests[0].template_args == args
    assert engine.requests[0].reasoning_budget == budget
    assert "warning" not in reply.headers


def test_a_budget_wins_over_the_level(engine, client):
    more = {"thinking_budget": 7}
    client.chat.completions.create(**ASK, reasoning_effort="low", extra_body=more)
    assert engine.requests[0].reasoning_budget == ReasoningBudget(7, "thinking_budget")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [ADD, ADD]}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
                ]
            },
            "tools[0]",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": FORCED[1][0]}, "tool_choice"),
        ({"tools": [ADD], "guided_regex": "a"}, "guided_regex"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"functions": [{"name": "a"}]}, "functions"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_done_is_a_400_naming_it(engine, raw, fields, param):
    status, _, reply = raw.post(RAW, {**ASK, **fields})
    assert status == 400
    assert reply["error"]["param"].startswith(param)
    assert not engine.requests


def test_choices_share_one_prompt(engine, client):
    client.chat.completions.create(**ASK, n=3)
    assert len({request.group for request in engine.requests}) == 1
    client.chat.completions.create(**ASK)
    assert engine.requests[-1].group is None
