"""A user's own requests, one JSON object a line. All mistakes of a file are reported together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import ConfigError, Problem, nearest
from pipeline.types import Grammar
from pipeline.types.places import user_path

Line = Mapping[str, Any]
SHOWN = 10  # problems of one file


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_turn, value))


def _turn(one: Any) -> bool:
    return isinstance(one, dict) and _text(one.get("role")) and _text(one.get("content"))


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _stops(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(stop, str) and stop for stop in value)


FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_text, "a text"),
    "messages": (_turns, "a list of {role, content}"),
    "max_tokens": (_whole, "a whole number"),
    "temperature": (_number, "a number"),
    "seed": (_whole, "a whole number"),
    "stop": (_stops, "a list of texts"),
    "json_schema": (lambda value: isinstance(value, dict), "a JSON schema"),
    "at": (_number, "seconds"),
    "leave_after": (_whole, "a whole number"),
}


HINT = 'Type workload.path=FILE; a line of it is a request: {"prompt": "…"}'


def read(path: str) -> Sequence[Line]:
    """Each line's own `at`, `temperature`, `seed`, `leave_after`, `json_schema`, and under `wanted`
    the fields of its Request. ConfigError names the file, the lines and what they want."""
    file = user_path(path)
    try:
        rows = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        what = f"{file} cannot be read: {why}."
        raise ConfigError([Problem("workload.path", what, HINT)]) from None
    problems: list[Problem] = []
    lines = [_line(number, row, problems) for number, row in enumerate(rows, 1) if row.strip()]
    if not lines:
        problems.append(Problem(str(file), "has no request.", 'Write {"prompt": "…"} in a line.'))
    if problems:
        more = len(problems) - SHOWN
        rest = [Problem(str(file), f"and {more} more.")] if more > 0 else []
        raise ConfigError([*problems[:SHOWN], *rest])
    return lines


def _line(number: int, row: str, problems: list[Problem]) -> Line:
    where = f"workload.path line {number}"
    try:
        said = json.loads(row)
    except json.JSONDecodeError as error:
        problems.append(Problem(where, f"is no JSON: {error}."))
        return {}
    if not isinstance(said, dict):
        problems.append(Problem(where, "wants an object.", 'Write {"prompt": "…"}.'))
        return {}
    found = list(_mistakes(where, said))
    problems += found
    return {} if found else {**said, "wanted": _wanted(said)}


def _mistakes(where: str, said: Mapping[str, Any]) -> Iterator[Problem]:
    if ("prompt" in said) == ("messages" in said):
        yield Problem(where, "wants either prompt or messages.")
    for key, value in said.items():
        if key not in FIELDS:
            yield Problem(f"{where} {key}", "no such field.", _known(key))
        elif not FIELDS[key][0](value):
            yield Problem(f"{where} {key}", f"wants {FIELDS[key][1]}, got {value!r}.")


def _known(key: str) -> str:
    return f"{nearest(key, FIELDS)} Fields: {', '.join(FIELDS)}.".strip()


def _wanted(said: Mapping[str, Any]) -> dict[str, Any]:
    wanted: dict[str, Any] = {"max_tokens": said["max_tokens"]} if "max_tokens" in said else {}
    if "messages" in said:
        wanted["messages"] = tuple(said["messages"])
    else:
        wanted["text"] = said["prompt"]
    if "stop" in said:
        wanted["stop"] = tuple(said["stop"])
    if "json_schema" in said:
        wanted["grammar"] = Grammar("json_schema", json.dumps(said["json_schema"]))
    return wanted
