"""The messages of a chat: what clients send, and what chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field

from pipeline.server.body import parse_object, refuse_complex
from pipeline.server.errors import invalid
from pipeline.server.schema import Body, Many, read

TEXTS = ("text", "input_text", "output_text")  # kinds of parts that are text


class TextPart(Body):
    type: str
    text: str


class CalledFunction(Body):
    name: str = Field(min_length=1)
    arguments: str = ""


class ToolCall(Body):
    """An assistant's call, as a client sends it back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other name


Plain = dict[str, Any]


def plain_messages(messages: Sequence[Message]) -> tuple[tuple[Plain, ...], list[str]]:
    """What templates read, and the names of unknown fields."""
    plain, ignored = [], []
    refuse_complex_calls(call.function for m in messages for call in m.tool_calls or ())
    for i, message in enumerate(messages):
        plain.append(_message(message, f"messages[{i}]"))
        ignored += [f"messages[{i}].{name}" for name in message.model_extra or {}]
    return tuple(named_results(plain)), ignored


def _message(message: Message, where: str) -> Plain:
    """The message as templates read it: text joined, `developer` is called system, nothing null."""
    content = message.content
    if isinstance(content, list) and content:
        content = "".join(text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and message.role == "assistant":
        if not (message.tool_calls or message.reasoning_content or message.reasoning):
            raise invalid(f"{where}.content: is missing.", f"{where}.content", "invalid_type")
        content = ""
    if not isinstance(content, str):
        message_text = f"{where}.content: must be a string or a list of text parts."
        raise invalid(message_text, f"{where}.content", "invalid_type")
    thought = message.reasoning_content or message.reasoning
    calls = [call_for_template(call.id, call.function) for call in message.tool_calls or ()]
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": thought,
        "tool_calls": calls or None,
    }
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **{k: v for k, v in more.items() if v is not None}}


class HasArguments(Protocol):
    arguments: str


def refuse_complex_calls(calls: Iterable[HasArguments]) -> None:
    """Their arguments are JSON in strings, which the body's own bounds do not count."""
    refuse_complex(
        [call.arguments.encode() for call in calls], "arguments: those of all calls have"
    )


def call_for_template(call_id: str | None, function: CalledFunction) -> Plain:
    """Templates want the arguments as an object; what is none stays text."""
    try:
        arguments: Any = parse_object((function.arguments or "{}").encode())
    except ValueError:
        arguments = function.arguments
    called = {"name": function.name, "arguments": arguments}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": called}


def text_of(part: Any, where: str) -> str:
    """A part's text. RequestError for images, sounds, files, and whatever else is not text."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] not in TEXTS:
        message = f"{where}.type: only text parts are supported."
        raise invalid(message, f"{where}.type", "unsupported_value")
    return read(TextPart, part, where).text


def named_results(messages: Sequence[Plain]) -> list[Plain]:
    """Results of tools with the name of the function that was called, which some templates write."""
    names: dict[str, str] = {}
    found = []
    for message in messages:
        calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
        names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
        own = names.get(message.get("tool_call_id") or "")
        missing = message["role"] == "tool" and own and "name" not in message
        found.append({**message, "name": own} if missing else message)
    return found
