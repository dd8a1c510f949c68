"""Grammars that are too much to compile. llguidance follows rules and references by recursion, and a chain
of some thousands ends the process; what it takes to see whether patterns can hold together doubles with each
of them, and nothing stops it. What is refused here is many times what real ones have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from pipeline.types import Grammar

SIZE = 1 << 19  # characters
# of rules times brackets, or of a schema and all that its references lead to, in each other
LEVELS = 1000
PATTERNS = (
    10  # and formats of parts that are joined: by &, allOf, or a reference with more beside it
)
TEXTS = ("pattern", "format")
_LEVELS = f"rules or references may go {LEVELS} levels deep"
# What is no rule: texts of both, GBNF's sets of letters (in Lark the brackets of what may be left out) and Lark's
# patterns. Of one line: what opens on one and closes on another could hide rules. What does not close is taken to
# the line's end, or each of a row of brackets would be followed there again.
_TEXT = r'"(?:\\.|[^"\\\n])*(?:(")|\\?$)'
_LITERAL = MappingProxyType(
    {
        "gbnf": re.compile(_TEXT + r"|\[(?:\\.|[^\]\\\n])*(?:(\])|\\?$)", re.M),
        "lark": re.compile(_TEXT + r"|/(?:\\.|[^/\\\n])+(?:(/)|\\?$)", re.M),
    }
)
_SCHEMA = re.compile(r"%json\s*(?={)")


def too_much(grammar: Grammar) -> str:
    """Why it is not even tried; empty if it may be. ValueError for a schema that is no JSON."""
    if why := too_long(grammar.source):
        return why
    if grammar.kind in ("regex", "choice"):
        return ""  # they refer to nothing, and llguidance counts their brackets
    try:
        rules, schemas = _taken_apart(grammar)
    except RecursionError:
        return _LEVELS
    rules = _without_literals(rules, grammar.kind)
    heads = rules.count(":") - rules.count("::=")
    if heads * (1 + _brackets(rules)) > LEVELS or any(map(_deep, schemas)):
        return _LEVELS
    if rules.count("&") > PATTERNS or any(map(_joins_too_much, schemas)):
        return f"parts that are joined may have {PATTERNS} patterns and formats altogether"
    return ""


def too_long(source: str) -> str:
    return f"it may have {SIZE} characters" if len(source) > SIZE else ""


def _taken_apart(grammar: Grammar) -> tuple[str, list[Any]]:
    """Rules, and the schemas in them."""
    if grammar.kind == "json_schema":
        return "", [json.loads(grammar.source)]
    rules, schemas, at = [], [], 0
    while found := _SCHEMA.search(grammar.source, at):
        rules.append(grammar.source[at : found.start()])
        schema, at = json.JSONDecoder().raw_decode(grammar.source, found.end())
        schemas.append(schema)
    return "".join([*rules, grammar.source[at:]]), schemas


def _without_literals(rules: str, kind: str) -> str:
    """One that does not close stays, all of its line: what it could be is counted."""
    if kind not in _LITERAL:
        return rules
    return _LITERAL[kind].sub(lambda found: "" if found.lastindex else found[0], rules)


def _brackets(text: str) -> int:
    depth = deepest = 0
    for letter in text:
        depth = max(0, depth + (letter in "([{") - (letter in ")]}"))
        deepest = max(deepest, depth)
    return deepest


def _deep(root: Any) -> bool:
    """By what a path through all that is referred to could have at most, each part once."""
    levels, waiting, seen = 0, [root], set[int]()
    while waiting and levels <= LEVELS:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            layers = list(_layers(part))
            levels += len(layers)
            waiting += [p for layer in layers for one in layer for p in _referred(root, one)]
    return levels > LEVELS


def _layers(part: Any) -> Iterator[list[Any]]:
    """What lies in it, level by level, references not followed."""
    level = [part]
    while level:
        yield level
        level = [one for each in level for one in _inside(each)]


def _joins_too_much(root: Any) -> bool:
    joining = [part for part in _reached([root], root) if _joins(part)]
    told = (part for part in _reached(joining, root) if isinstance(part, dict))
    return sum(isinstance(part.get(name), str) for part in told for name in TEXTS) > PATTERNS


def _joins(part: Any) -> bool:
    if not isinstance(part, dict) or part.keys().isdisjoint(("allOf", "$ref")):
        return False
    members = part.get("allOf")
    several = isinstance(members, list) and len(members) > 1
    return several or not part.keys().isdisjoint((*TEXTS, "properties", "items"))


def _reached(waiting: list[Any], root: Any) -> Iterator[Any]:
    """All that lies in these and that they refer to, each part once."""
    waiting, seen = [*waiting], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [*_inside(part), *_referred(root, part)]


def _inside(part: Any) -> Iterator[Any]:
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return (value for value in values if isinstance(value, dict | list))


def _referred(root: Any, part: Any) -> Iterator[Any]:
    """Where its reference leads, if it has one, and that is in the schema."""
    where = part.get("$ref") if isinstance(part, dict) else None
    if not isinstance(where, str) or not where.startswith("#"):
        return
    found = root
    for step in where[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return
    if isinstance(found, dict | list):
        yield found
