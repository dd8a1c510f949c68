"""Tools for chat templates that know none: the prompt that Hermes and Qwen2.5 models were trained with.

Source: the chat template of Qwen2.5-Instruct.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(
    messages: Sequence[Message], tools: Sequence[Message], *, system: bool
) -> list[dict[str, Any]]:
    """Plain messages that say the same: the tools in the system message (or, where the template takes
    none, before the first user message), calls in the text, results as a user's turn."""
    plain = list(_plain(messages))
    if not tools:
        return plain
    prompt = PROMPT.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
    role = "system" if system else "user"
    if plain and plain[0]["role"] == role:
        first = plain[0]
        parts = (first["content"], prompt) if system else (prompt, first["content"])
        return [{**first, "content": "\n\n".join(filter(None, parts))}, *plain[1:]]
    return [{"role": role, "content": prompt}, *plain]


def speaks_of_tools(messages: Iterable[Message]) -> bool:
    """Whether a chat has calls or results, which such a template would drop."""
    return any(m.get("tool_calls") or m["role"] == "tool" for m in messages)


def _plain(messages: Iterable[Message]) -> Iterable[dict[str, Any]]:
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        yield _with_calls(message)
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _with_calls(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
    return {**rest, "content": "\n".join(filter(None, [message.get("content"), *texts]))}


def _call(call: Message) -> str:
    function = call["function"]
    said = {"name": function["name"], "arguments": function.get("arguments", {})}
    return json.dumps(said, ensure_ascii=False)
