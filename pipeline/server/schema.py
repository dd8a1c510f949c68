"""The request bodies: types and ranges of everything honoured. Null means "not said" everywhere.

Strict: a string is no number, a boolean no number, 3.0 no integer. Names not declared here land in
`model_extra` and are judged by `neutral`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import RequestError
from pipeline.server.errors import invalid

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
_BIG = 2**31 - 1
_TEMPLATE_OWN = frozenset({"messages", "add_generation_prompt", "self"})  # given by the server
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


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


Count = Annotated[int, Field(ge=0, le=_BIG)]
Ceiling = Annotated[int, Field(ge=0, le=2**63 - 1)]  # cut to the room that is left
Stop = Annotated[Any, AfterValidator(_read_stop)]
Bias = Annotated[Any, AfterValidator(_read_bias)]
Prompt = Annotated[Any, AfterValidator(_read_prompt)]
TemplateArgs = Annotated[Any, AfterValidator(_read_args)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", arbitrary_types_allowed=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted; streams are never padded


class Common(_Body):
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
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-8, le=8)] | None = None  # higher is sooner
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # ours
    ignore_eos: bool | None = None
    session_id: str | None = None
    prefill_chunk: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Ceiling | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateArgs = Field(default=None, validate_default=True)


class TextBody(Common):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


B = TypeVar("B", bound=BaseModel)


def read(kind: type[B], value: Any, where: str = "") -> B:
    """A checked model. RequestError that names each wrong field and echoes none of its values."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
    said = [(_path(f["loc"], where), f["msg"].removeprefix("Value error, ")) for f in faults]
    message = "; ".join(f"{path}: {text}" for path, text in said[:_REPORTED])
    raise _refusal(message, said[0][0], faults[0]["type"])


def _refusal(message: str, path: str, kind: str) -> RequestError:
    if kind == "missing":
        return invalid(message, path, "missing_required_parameter")
    return invalid(message, path, "invalid_type" if kind.endswith("_type") else "invalid_value")


def _path(loc: tuple[int | str, ...], where: str) -> str:
    path = where
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")[:200]
