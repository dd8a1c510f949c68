"""The form an answer must have, under all the names that clients give it.

The first that is there wins, in this order: guided_grammar, grammar (llama.cpp), response_format and
other JSON schemas, JSON objects, structured_outputs (vLLM), guided_regex, guided_choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.grammars import make_grammar
from pipeline.server.errors import invalid
from pipeline.server.schema import Common
from pipeline.types import Grammar

Asked = tuple[str, str, Any]  # kind, field, source
ANY_OBJECT = {"type": "object"}
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "gbnf"}


def wanted_grammar(body: Common) -> Grammar | None:
    """RequestError that names the field, where what is asked is not of its form."""
    given = next(_given(body), None)
    if given is None:
        return None
    kind, field, source = given
    spaces = body.structured_outputs or {}
    compact = bool(spaces.get("disable_any_whitespace")) or spaces.get("any_whitespace") is False
    try:
        return make_grammar(kind, source, field, compact=compact)
    except ValueError as error:
        raise invalid(f"{field}: {error}.", field) from None


def _given(body: Common) -> Iterator[Asked]:
    """All that is asked for, the strongest first."""
    formats = list(_response_format(body.response_format or {}))
    for field, kind, source in (
        ("guided_grammar", "gbnf", body.guided_grammar),
        ("grammar", "gbnf", body.grammar),
    ):
        if source:
            yield kind, field, source
    yield from formats
    for field, schema in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if schema is not None:
            yield "json_schema", field, schema
    yield from _structured(body.structured_outputs or {})
    if body.guided_regex:
        yield "regex", "guided_regex", body.guided_regex
    if body.guided_choice is not None:
        yield "choice", "guided_choice", body.guided_choice


def _response_format(value: Mapping[str, Any]) -> Iterator[Asked]:
    if not value:
        return
    readers: dict[Any, Callable[[], Iterator[Asked]]] = {
        "text": lambda: iter(()),
        "json_object": lambda: iter([("json_schema", "response_format", ANY_OBJECT)]),
        "json_schema": lambda: _json_schema(value.get("json_schema")),
    }
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in readers:
        message = "response_format.type: wants text, json_object or json_schema."
        raise invalid(message, "response_format")
    yield from readers[kind]()


def _json_schema(value: Any) -> Iterator[Asked]:
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        message = "response_format.json_schema: wants an object with a name and a schema."
        raise invalid(message, "response_format")
    yield "json_schema", "response_format", value["schema"]


def _structured(value: Mapping[str, Any]) -> Iterator[Asked]:
    known = {*STRUCTURED, "json_object", "disable_any_whitespace", "any_whitespace"}
    if odd := sorted(
        name for name, said in value.items() if said is not None and name not in known
    ):
        message = f"structured_outputs.{odd[0]}: not supported. Known: {', '.join(sorted(known))}."
        raise invalid(message, "structured_outputs", "unsupported_parameter")
    for name, kind in STRUCTURED.items():
        if value.get(name) is not None:
            yield kind, "structured_outputs", value[name]
    if value.get("json_object"):
        yield "json_schema", "structured_outputs", ANY_OBJECT
