"""Sessions of real client code: streaming helpers, tool loops, structured outputs, LangChain, llm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from pipeline.types import Event, Request

CALL = '<think>\nhm\n</think>\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
USER: Any = [{"role": "user", "content": "What is 2 + 3?"}]


class Place(BaseModel):
    name: str
    people: int


@pytest.fixture
def scripted(engine, script):
    """A model that calls `add`, and says the sum once it has it; that gives a place where one is
    demanded."""

    def plan(request: Request) -> Iterator[Event | float]:
        assert request.messages is not None
        last = request.messages[-1]
        text = f"It is {last['content']}." if last["role"] == "tool" else CALL
        tools = request.template_args.get("tools", ())
        forced = [tool["function"]["name"] for tool in tools if tool["function"]["name"] == "Place"]
        place = '{"name": "Ulm", "people": 3}'
        if forced:
            text = f'<tool_call>\n{{"name": "Place", "arguments": {place}}}\n</tool_call>'
        elif request.grammar is not None and request.grammar.kind == "json_schema":
            text = place
        yield from script.saying(text, 7)(request)

    engine.plan = plan
    return engine


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one
        b: another
    """
    return str(a + b)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def test_openai_streaming_helper_and_tool_loop(scripted, client):
    messages = list(USER)
    with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        reply = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    (call,) = reply.tool_calls
    assert call.function.parsed_arguments == {"a": 2, "b": 3}
    messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": add(2, 3)}]
    with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "It is 5."
    assert scripted.requests[-1].messages[1]["tool_calls"][0]["id"] == call.id


def test_openai_parse_helpers(scripted, client):
    chat = client.chat.completions.parse(model="m", messages=USER, response_format=Place)
    assert chat.choices[0].message.parsed == Place(name="Ulm", people=3)
    with client.chat.completions.stream(model="m", messages=USER, response_format=Place) as stream:
        parsed = [e.parsed for e in stream if e.type == "content.delta" and e.parsed]
        assert stream.get_final_completion().choices[0].message.parsed == Place(
            name="Ulm", people=3
        )
    assert parsed[-1] == {"name": "Ulm", "people": 3}
    with client.responses.stream(model="m", input="hi", text_format=Place) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Place(name="Ulm", people=3)


def test_openai_responses_tool_loop(scripted, client):
    tool: Any = {"type": "function", **TOOL["function"]}
    first = client.responses.create(model="m", input="What is 2 + 3?", tools=[tool])
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": add(**json.loads(call.arguments)),
    }
    # the client keeps the conversation itself, or the server does
    history: Any = [{"role": "user", "content": "What is 2 + 3?"}, *first.output, result]
    for more in ({"input": history}, {"input": [result], "previous_response_id": first.id}):
        assert client.responses.create(model="m", tools=[tool], **more).output_text == "It is 5."
    whole, linked = (request.messages for request in scripted.requests[-2:])
    assert whole == linked


def test_anthropic_tool_runner(scripted, anthropic_client):
    for streamed in (False, True):
        runner = anthropic_client.beta.messages.tool_runner(
            model="m", max_tokens=99, messages=USER, tools=[beta_tool(add)], stream=streamed
        )
        final = runner.until_done()
        assert [block.text for block in final.content] == ["It is 5."]
    result = scripted.requests[-1].messages[-1]
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "5")
    with pytest.raises(anthropic.NotFoundError):  # the server holds these conversations
        anthropic_client.beta.messages.create(
            model="m", max_tokens=9, messages=USER,
            thread={"type": "continue", "previous_message_id": "msg_" + "0" * 32},
        )  # fmt: skip


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(scripted, served, responses):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="m", base_url=served[1] + "/v1", api_key="none", use_responses_api=responses
    )
    bound = model.bind_tools([add])
    first = bound.invoke("What is 2 + 3?")
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
    history = [HumanMessage("What is 2 + 3?"), first, ToolMessage("5", tool_call_id=call["id"])]
    assert bound.invoke(history).text == "It is 5."
    chunks = list(bound.stream("What is 2 + 3?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == {"a": 2, "b": 3}
    assert whole.usage_metadata is None or whole.usage_metadata["output_tokens"] > 0
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Place, method=method)
        assert structured.invoke("Where?") == Place(name="Ulm", people=3)


def test_llm(scripted, served, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    from llm.default_plugins.openai_models import Chat

    model = Chat(
        "headrace", model_name="m", api_base=served[1] + "/v1", supports_tools=True,
        supports_schema=True,
    )  # fmt: skip
    for stream in (False, True):
        answer = model.chain("What is 2 + 3?", tools=[add], key="none", stream=stream)
        assert answer.text() == "It is 5."
        structured = model.prompt("Where?", schema=Place, key="none", stream=stream)
        assert json.loads(structured.text()) == {"name": "Ulm", "people": 3}
