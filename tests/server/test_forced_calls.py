"""Calls that are demanded, by a model that would write anything else: the real engine on recipe `fake`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

import pipeline
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% for tool_call in m.tool_calls or () %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ opening }}{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "now": {"type": "boolean"}},
    "required": ["unit", "now"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "seed": 5,
    "temperature": 1.0,
    "max_tokens": 4000,
}
BASE = ("constraint=llguidance", "model.context=16000", "model.layers=1")


@pytest.fixture(scope="module", params=["none", "grammar"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    drafting = ("flow=speculative", f"drafter={request.param}", f"model.template={file}")
    with (
        pipeline.load("fake", *BASE, *drafting) as engine,
        serve_in_thread(engine, ServerSettings()) as base,
    ):
        yield base


@pytest.fixture
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the first engine said, to be said by the second too."""
    return {}


def checked(call: Any) -> tuple[str, dict[str, Any]]:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["unit"] in ("celsius", "fahrenheit")
        assert type(arguments["now"]) is bool and len(arguments) == 2
    return call.function.name, arguments


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ],
)
def test_what_is_demanded_is_valid(client, told, choice, names):
    ask = {**ASK, "tools": [WEATHER, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
    reply = client.chat.completions.create(**ask)
    assert reply.choices[0].finish_reason == "tool_calls"
    (call,) = reply.choices[0].message.tool_calls
    assert checked(call)[0] in names
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert checked(final.choices[0].message.tool_calls[0]) == checked(call)
    said = (checked(call), reply.usage.completion_tokens)
    assert told.setdefault(str(choice), said) == said  # whatever drafts it


def test_several_calls_and_their_bound(client):
    ask = {**ASK, "tools": [WEATHER], "tool_choice": "required"}
    calls = client.chat.completions.create(**ask).choices[0].message.tool_calls
    assert 1 <= len(calls) <= 32
    assert all(checked(call)[0] == "weather" for call in calls)
    assert len({call.id for call in calls}) == len(calls)


def test_an_answer_by_a_schema_beside_tools(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    ask = {**ASK, "tools": [WEATHER], "response_format": form, "parallel_tool_calls": False}
    message = client.chat.completions.create(**ask).choices[0].message
    if message.tool_calls:
        checked(message.tool_calls[0])
    else:
        assert set(json.loads(message.content)) == {"unit", "now"}


def test_the_other_families_demand_too(client, base):
    tool: Any = {"type": "function", **WEATHER["function"]}
    reply = client.responses.create(
        model="m", input="hi", tools=[tool], tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=200,
    )  # fmt: skip
    assert json.loads(reply.output[0].arguments)["unit"] in ("celsius", "fahrenheit")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model="m", max_tokens=200, messages=ASK["messages"],
            tools=[{"name": "weather", "input_schema": SCHEMA}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )  # fmt: skip
    assert message.content[0].input["unit"] in ("celsius", "fahrenheit")
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/secret"},
        {"$ref": "file:///etc/passwd"},
        {"type": "object", "properties": {"a": {"pattern": "(["}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]},
    ],
)
def test_schemas_that_cannot_be_had(client, schema):
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, tools=[tool], tool_choice="required")
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("tools", [None, [CLOCK]], ids=["alone", "beside tools"])
@pytest.mark.parametrize(
    "schema", ["[" * 100_000, '{"not":' * 999 + "{}" + "}" * 999, "no JSON", "3"]
)
def test_a_schema_that_is_none_or_too_deep_to_be_read(base, script, tools, schema):
    body = {**ASK, "guided_json": schema, **({"tools": tools} if tools else {})}
    status, _, reply = script.Raw(base).post("/v1/chat/completions", body)
    assert (status, reply["error"]["param"]) == (400, "guided_json")


def test_choices_share_one_prefill(client, base, script):
    raw = script.Raw(base)

    def prefilled() -> int:
        counts = json.loads(raw.call("GET", "/stats")[2])["counts"]
        return int(counts.get("prompt_tokens", 0) - counts.get("cached_tokens", 0))

    text = "a long prompt that nobody has sent before " * 20
    before = prefilled()
    reply = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], n=4, max_tokens=3, seed=1
    )
    assert len(reply.choices) == 4
    usage = reply.usage
    fresh = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    assert fresh > 800
    assert prefilled() - before == fresh + 3  # the last token is each choice's own


def test_without_a_constraint_nothing_can_be_demanded():
    with (
        pipeline.load("fake") as engine,
        serve_in_thread(engine, ServerSettings()) as base,
        openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client,
    ):
        free = client.chat.completions.create(**{**ASK, "max_tokens": 3}, tools=[CLOCK])
        assert free.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="constraint=llguidance"):
            client.chat.completions.create(**ASK, tools=[CLOCK], tool_choice="required")
