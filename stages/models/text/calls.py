"""Tool calls as model families write them, read by mlx-lm's parsers.

A call written as plain JSON, `{"name": …, "arguments": {…}}` or a list of such, is understood from every
family: it is what `forced` makes a model write.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.types import ToolCall

# parser of `mlx_lm.tool_parsers` -> what a template of its family holds, the most telling first.
# Source: `_infer_tool_parser` of mlx_lm.tokenizer_utils
TELLING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("qwen3_coder", ("<tool_call>\\n<function=",)),
    ("qwen3_coder", ("<tool_call>\n<function=",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>", "tool_call.name")),
)
VOCABULARY = (
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
)
# special tokens inside a call, which must be seen to read it
INNER: Mapping[str, tuple[str, ...]] = {
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
}
JSON_TOOLS = "json_tools"

Parser = Callable[[str, Any], Any]


def infer(template: str, has_token: Callable[[str], bool]) -> str | None:
    """The parser's name; None where nothing is known of the family."""
    for name, words in TELLING:
        if all(word in template for word in words):
            return name
    for name, words in VOCABULARY:
        if all(map(has_token, words)):
            return name
    return None


@dataclass(frozen=True)
class CallFormat:
    """One family's way to write calls. An `end` that is empty: they go on to the end of the text."""

    name: str
    begin: str
    end: str
    inner: tuple[str, ...] = ()
    parser: Parser | None = None  # None: JSON and nothing else

    @classmethod
    def of(cls, name: str) -> CallFormat:
        """Imports mlx-lm's parser, unless the family writes JSON. ImportError for an unknown name."""
        if name == JSON_TOOLS:
            return cls(name, "<tool_call>", "</tool_call>")
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        begin, end = module.tool_call_start, module.tool_call_end
        return cls(name, begin, end, INNER.get(name, ()), module.parse_tool_call)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        """What stands between the marks; ValueError where it is no call."""
        try:
            found = _as_json(text)
            if found is None and self.parser is not None:
                found = self.parser(text, list(tools))
            calls = found if isinstance(found, list) else [found]
            return [_call(call) for call in calls]
        except Exception as error:  # parsers fail in their own ways at what a model may write
            raise ValueError(f"no tool call: {error!r}") from error


def _as_json(text: str) -> Any:
    """None where the text is no JSON at all."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(found: Any) -> ToolCall:
    given = found.get("arguments", found.get("parameters", {}))
    arguments = json.loads(given) if isinstance(given, str) else given
    name, own = found["name"], found.get("id")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(name, text, own if isinstance(own, str) and own else None)
