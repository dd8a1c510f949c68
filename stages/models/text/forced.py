"""The grammar of tool calls: what a model must write so that its call is valid by construction.

Lark as llguidance reads it. A call is JSON between the family's marks, whatever the family writes when it
is free: `{"name": "f", "arguments": {…}}`, with the arguments by the tool's own schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

MOST_CALLS = 32  # calls in one answer; a weak model would otherwise go on for ever
# as `json.dumps` writes it: what models have seen most, and one way to write a value, so that it can be drafted
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

IN_LIST = '", " one'
NEXT = '"\\n" call'

Term = Callable[[str], str]  # a mark's Lark terms


def call_grammar(
    begin: str, end: str, term: Term, tools: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]
) -> str:
    """`wanted` has `must` (nothing but calls), `many` (more than one) and `answer` (JSON schema of an
    answer without calls, or None). `tools` are chat's `{function: {name, parameters, strict}}`."""
    lines = [_start(begin, end, term, wanted), _one_of(tools)]
    lines += [_tool(i, tool["function"], held=bool(wanted["must"])) for i, tool in enumerate(tools)]
    if wanted["answer"] is not None:
        lines.append(f"answer: %json {json.dumps(_spaced(wanted['answer']))}")
    return "\n".join(lines)


def _start(begin: str, end: str, term: Term, wanted: Mapping[str, Any]) -> str:
    more = MOST_CALLS - 1 if wanted["many"] else 0
    if wanted["must"] or wanted["answer"] is not None:
        start = "start: calls" if wanted["must"] else "start: calls | answer"
        return "\n".join([start, *_calls(begin, end, term, more)])
    many = f"{{0,{more + 1}}}"
    after = [f"after: {_body(end, term)}"]
    if term(begin).startswith("<"):  # a special token: no text can be mistaken for it
        first = f"tag: TEXT {term(begin)} after"
        return "\n".join([f"start: tag{many} TEXT", first, *after, "TEXT: /(.|\\n)*/"])
    quoted = term(begin)
    return "\n".join(
        [
            f"start: tag{many} REST",
            f"REST: /(.|\\n)*/ & ~/(.|\\n)*{_escaped(begin)}(.|\\n)*/",
            "TEXT: /(.|\\n)*/",
            f"head[lazy]: TEXT {quoted}",
            "tag: head after",
            *after,
        ]
    )


def _calls(begin: str, end: str, term: Term, more: int) -> Iterable[str]:
    if not end:
        yield f'calls: {term(begin)} "[" one{_again(IN_LIST, more)} "]"'
        return
    yield f"calls: call{_again(NEXT, more)}"
    yield f"call: {term(begin)} {_body(end, term)}"


def _body(end: str, term: Term) -> str:
    return f'"\\n" one "\\n" {term(end)}' if end else '"[" one (", " one)* "]"'


def _one_of(tools: Sequence[Mapping[str, Any]]) -> str:
    return "one: " + " | ".join(f"tool_{i}" for i in range(len(tools)))


def _tool(index: int, function: Mapping[str, Any], *, held: bool) -> str:
    """`held`: the schema binds also where the tool is not strict."""
    head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
    schema = function.get("parameters") if held or function.get("strict") else None
    schema = {"type": "object", **(schema or {})}
    return (
        f'tool_{index}: {head} args_{index} "}}"\nargs_{index}: %json {json.dumps(_spaced(schema))}'
    )


def _spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": SPACING}


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _again(what: str, most: int) -> str:
    """Up to `most` more of them."""
    return f" ({what}){{0,{most}}}" if most else ""
