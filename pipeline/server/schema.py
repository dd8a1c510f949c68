"""The request bodies: types and ranges of everything honoured. Null means "not said" everywhere.

Strict: a string is no number, a boolean no number, 3.0 no integer. Names not declared here land in
`model_extra` and are judged by `neutral`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from pipeline.asking import ADAPTER_ID, ADAPTERS, adapter_ids
from pipeline.errors import RequestError
from pipeline.server.errors import invalid

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
_BIG = 2**31 - 1
B = TypeVar("B", bound=BaseModel)
V = TypeVar("V")
_TEMPLATE_OWN = frozenset({"messages", "tools", "add_generation_prompt", "self"})  # ours to give
_WORD: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
# how the fields that are read by code look to clients
_STOP = {
    "anyOf": [_WORD, {"type": "array", "maxItems": MAX_STOPS, "items": _WORD}, {"type": "null"}]
}
_BIAS = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _IDS,
        *({"type": "array", "minItems": 1, "items": item} for item in (_TEXT, _IDS)),
    ]
}
_ADAPTER = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "pattern": f"^{ADAPTER_ID.pattern}([+,]{ADAPTER_ID.pattern})*$"},
        {
            "type": "array",
            "uniqueItems": True,
            "items": {"type": "string", "pattern": f"^{ADAPTER_ID.pattern}$"},
        },
    ]
}
_OBJECT = {"type": ["object", "null"]}
_TRIED = re.compile(r"^[A-Z]|[\[(]|^(str|int|float|bool|tagged-union)$")
_REPORTED = 5  # faults of one body named in the message


def _read_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has more than {MAX_STOPS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _read_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    return tuple(dict(_bias(key, bias) for key, bias in value.items()).items())


def _bias(key: str, bias: Any) -> tuple[int, float]:
    if not re.fullmatch("[0-9]{1,10}", key):
        raise ValueError("each key must be a token id in decimal digits")
    if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
        raise ValueError("each value must be a number in -100..100")
    return int(key), float(bias)


def _read_prompt(value: Any) -> list[str] | list[list[int]]:
    """One prompt or several, as text or as ids: always a list of prompts of one kind."""
    if isinstance(value, str) or (_all(value, int) and value):
        value = [value]
    if not isinstance(value, list) or not (_all(value, str) or all(_all(v, int) for v in value)):
        raise ValueError("must be text, token ids, or a list of texts or of lists of token ids")
    if not value or not all(value):
        raise ValueError("must not be empty")
    return value


def _read_args(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be an object")
    if taken := sorted(_TEMPLATE_OWN & (value or {}).keys()):
        raise ValueError(f"{', '.join(taken)} cannot be set here")
    return value or {}


def _read_adapter(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    try:
        return adapter_ids(value)
    except TypeError:
        raise ValueError(f"must be {ADAPTERS}") from None


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


Count = Annotated[int, Field(ge=0, le=_BIG)]
Ceiling = Annotated[int, Field(ge=0, le=2**63 - 1)]  # cut to the room that is left
Stop = Annotated[Any, AfterValidator(_read_stop), WithJsonSchema(_STOP)]
Bias = Annotated[Any, AfterValidator(_read_bias), WithJsonSchema(_BIAS)]
Prompt = Annotated[Any, AfterValidator(_read_prompt), WithJsonSchema(_PROMPT)]
Adapter = Annotated[Any, AfterValidator(_read_adapter), WithJsonSchema(_ADAPTER)]
TemplateArgs = Annotated[Any, AfterValidator(_read_args), WithJsonSchema(_OBJECT)]


def _breathe(value: V) -> V:
    """Pydantic lets no other thread run. Between two items, which may be many, this does."""
    return value


# Up to the first item that is wrong: pydantic takes seconds, and hundreds of megabytes, to tell a million faults.
Many = Annotated[list[Annotated[V, AfterValidator(_breathe)]], Field(fail_fast=True)]


class Body(BaseModel):
    """Strict, and what is not declared is kept apart."""

    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; streams are never padded


class Common(Body):
    """What both completion endpoints take."""

    model: str | None = None  # one model is served; any name will do, the reply tells its true name
    max_tokens: Ceiling | None = None
    stop: Stop = Field(default=None, validate_default=True)
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Bias = None
    n: Annotated[int, Field(ge=1, le=_BIG)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # the form of the answer: see `grammars`
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-8, le=8)] | None = None  # higher is sooner
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # ours
    ignore_eos: bool | None = None
    session_id: str | None = None
    adapter: Adapter = None
    token_origins: bool | None = None  # say of each token where it came from
    prefill_chunk: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


def read(kind: type[B], value: Any, where: str = "") -> B:
    """A checked model. RequestError that names each wrong field and echoes none of its values."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    said = list(dict.fromkeys((_path(f["loc"], where), _words(f)) for f in faults))
    message = "; ".join(f"{path}: {text}" for path, text in said[:_REPORTED])
    raise _refusal(message, said[0][0], faults[0]["type"])


def _refusal(message: str, path: str, kind: str) -> RequestError:
    if kind == "missing":
        return invalid(message, path, "missing_required_parameter")
    return invalid(message, path, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _words(fault: Mapping[str, Any]) -> str:
    """What is wrong; never what was sent."""
    if fault["type"] == "union_tag_invalid":
        return f"Its type is none of {fault['ctx']['expected_tags']}"
    return str(fault["msg"]).removeprefix("Value error, ")


def _path(loc: tuple[int | str, ...], where: str) -> str:
    """The field's path; steps that only say which of several types was tried are left out."""
    path = where
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not _TRIED.search(step):
            path += f".{step}"
    return path.removeprefix(".")[:200]
