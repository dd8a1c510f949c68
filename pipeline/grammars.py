"""From what users write for the form of an answer to a Grammar."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from pipeline.types import Grammar

# "tools" are no form that anybody writes down: see `pipeline.server.tools`
KINDS = tuple(kind for kind in get_args(get_type_hints(Grammar)["kind"]) if kind != "tools")


def make_grammar(kind: str, source: Any, field: str, *, compact: bool = False) -> Grammar:
    """A schema may be given as an object or as its JSON text, choices as a list of texts, the rest
    as text. ValueError that says what is wanted."""
    if kind not in KINDS:
        raise ValueError(f"wants one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "json_schema" and isinstance(source, dict | bool):
        source = json.dumps(source)
    if kind == "choice":
        source = json.dumps(_choices(source))
    if not isinstance(source, str) or not source:
        raise ValueError(f"the {kind} must be a text that is not empty")
    return Grammar(kind, source, field, compact)  # type: ignore[arg-type]


def _choices(source: Any) -> list[str]:
    if not isinstance(source, list | tuple) or not source:
        raise ValueError("the choices must be a list that is not empty")
    if not all(isinstance(word, str) and word for word in source):
        raise ValueError("each choice must be a text that is not empty")
    return list(source)
