"""Reasoning, answer and calls told apart: the same pieces however the text is cut."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import ClosedError
from pipeline.server.pools import Pools
from pipeline.server.speech import CallBegins, Speech
from pipeline.server.voices import Voice
from pipeline.types import Delta, Done, Speculation, Usage
from stages.models.fake import ByteTokens

QWEN = "{% if tools %}{{ tool_call.name }}<tool_call>{% endif %}<think></think>{{ messages }}"
CODER = "{% if tools %}<tool_call>\n<function={% endif %}{{ messages }}"
MISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}{{ messages }}"
DIALECTS = {template: ByteTokens(template).dialect for template in (QWEN, CODER, MISTRAL)}
POOLS = Pools()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}</tool_call>"}}\n</tool_call>'


def said(text, cuts=(), template=QWEN, tools=TOOLS, inside=False):
    """The joined pieces, as (kind, text)."""
    dialect = DIALECTS[template]
    speech = Speech(dialect, inside=inside, calls=tools is not None)
    voice = Voice(speech, dialect, inside, tools or (), lambda n: f"call_{n}", POOLS)
    borders = [0, *sorted({c for c in cuts if 0 < c < len(text)}), len(text)]

    async def speak():
        for start, end in pairwise(borders):
            await voice.hear([Delta(text[start:end], ())])
        await voice.end(Done("stop", Usage(1, 1, 0), 0, {}, Speculation()))

    asyncio.run(speak())
    joined: list[list[str]] = []
    for piece in voice.pieces:
        kind = type(piece).__name__
        body = f"{piece.id}:{piece.name}" if isinstance(piece, CallBegins) else piece.text
        assert body, "an empty piece"
        if joined and joined[-1][0] == kind and kind != "CallBegins":
            joined[-1][1] += body
        else:
            joined.append([kind, body])
    return [tuple(each) for each in joined]


def test_a_call_that_could_not_be_read_is_no_text(monkeypatch):
    def gone(text, tools):
        raise ClosedError("the engine's process has ended")

    monkeypatch.setattr(DIALECTS[QWEN], "calls", gone)
    with pytest.raises(ClosedError):
        said('<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call>')


ARGUMENTS = '{"a": 1, "b": "}</tool_call>"}'
CASES = {
    "plain": ("hello <b> \n", [("Content", "hello <b> \n")]),
    "nothing": ("", []),
    "reasoning": ("\n<think>\nhm \n</think>\n\nyes", [("Reasoning", "hm"), ("Content", "yes")]),
    "reasoning that does not end": ("<think>hm </thin", [("Reasoning", "hm </thin")]),
    "a mark later on is text": ("so <think>x</think>", [("Content", "so <think>x</think>")]),
    "nearly a mark": (" <thin", [("Content", " <thin")]),
    "a call": (CALL, [("CallBegins", "call_0:add"), ("CallText", ARGUMENTS)]),
    "text, two calls, text": (
        f"ok \n{CALL}\n{CALL} done ",
        [
            ("Content", "ok"),
            ("CallBegins", "call_0:add"),
            ("CallText", ARGUMENTS),
            ("CallBegins", "call_1:add"),
            ("CallText", ARGUMENTS),
            ("Content", "done "),
        ],
    ),
    "reasoning and a call": (
        f"<think>hm</think>{CALL}",
        [("Reasoning", "hm"), ("CallBegins", "call_0:add"), ("CallText", ARGUMENTS)],
    ),
    "a list of calls": (
        '<tool_call>[{"name": "x", "arguments": {}}, {"name": "y", "arguments": "{}"}]</tool_call>',
        [
            ("CallBegins", "call_0:x"),
            ("CallText", "{}"),
            ("CallBegins", "call_1:y"),
            ("CallText", "{}"),
        ],
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call>',
        [("CallBegins", "call_0:add"), ("CallText", '{"a": 2}')],
    ),
    "no call after all": (
        "<tool_call>{oh no}</tool_call> x",
        [("Content", "<tool_call>{oh no}</tool_call>x")],
    ),
    "cut in its arguments": (
        '<tool_call>{"name": "add", "arguments": {"a": "x',
        [("CallBegins", "call_0:add"), ("CallText", '{"a": "x')],
    ),
    "arguments that break off": (
        '<tool_call>{"name": "add", "arguments": {"a": </tool_call>b',
        [("CallBegins", "call_0:add"), ("CallText", '{"a": '), ("Content", "b")],
    ),
    "cut in its name": ('<tool_call>{"name": "a', [("Content", '<tool_call>{"name": "a')]),
    "a mark that never comes": ("a <tool_cal", [("Content", "a <tool_cal")]),
    "a call that is not closed": (
        '<tool_call>{"name": "add", "arguments": {}} and so on',
        [("CallBegins", "call_0:add"), ("CallText", "{}"), ("Content", "and so on")],
    ),
}


@pytest.mark.parametrize(("text", "wanted"), CASES.values(), ids=CASES.keys())
def test_what_is_what_at_every_cut(text, wanted):
    assert said(text) == wanted
    assert said(text, range(len(text))) == wanted
    for cut in range(len(text)):
        assert said(text, (cut,)) == wanted


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", "arguments": ']
PARTS += ['{"a": "', "\\", '"', "{", "}", "}}", " ", "\n", "<", "x", "<tool", "[", "]"]


@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.data())
@example('<tool_call>{"name": "</tool_call>", "arguments": {}}</tool_call>', None)
def test_any_text_at_any_cuts(text, data):
    cuts = range(len(text)) if data is None else data.draw(st.sets(st.integers(0, len(text) or 1)))
    assert said(text, cuts) == said(text)
    assert said(text, cuts, inside=True) == said(text, inside=True)


@given(st.text(max_size=30), st.sets(st.integers(0, 30)))
def test_without_tools_and_reasoning_nothing_is_touched(text, cuts):
    wanted = [("Content", text)] if text else []
    assert said(text, cuts, template=MISTRAL, tools=None) == wanted


def test_arguments_are_given_out_as_they_come():
    speech = Speech(DIALECTS[QWEN], inside=False, calls=True)
    head, rest = CALL[:45], CALL[45:]
    begun, text = speech.push(head)
    assert begun == CallBegins("", "add") and text.text == '{"a"'
    assert "".join(p.text for p in speech.push(rest)) == ARGUMENTS.removeprefix(text.text)


def test_reasoning_opened_by_the_prompt():
    assert said("hm\n</think>\n\nyes", inside=True) == [("Reasoning", "hm"), ("Content", "yes")]


def test_calls_are_text_where_there_are_no_tools():
    assert said(CALL, tools=None) == [("Content", CALL)]


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        (
            CODER,
            "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
            [("add", {"a": 7})],
        ),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 7}', [("add", {"a": 7})]),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 7}}, {"name": "b", "arguments": {}}]',
            [("add", {"a": 7}), ("b", {})],
        ),
        (
            CODER,
            '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>',
            [("add", {"a": 7})],
        ),
    ],
)
def test_calls_of_other_families_and_json_everywhere(template, text, wanted):
    pieces = said(text, template=template)
    assert said(text, range(len(text)), template=template) == pieces
    names = [body.split(":")[1] for kind, body in pieces if kind == "CallBegins"]
    arguments = [json.loads(body) for kind, body in pieces if kind == "CallText"]
    assert list(zip(names, arguments, strict=True)) == wanted
