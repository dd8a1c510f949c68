"""Tools: what a request offers, what it demands, and how that binds the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from pipeline.server.errors import invalid
from pipeline.server.schema import Body
from pipeline.types import Dialect, Grammar, Request

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Chat's form of a tool; the only kind a client can answer."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class Choice:
    """Which tools are to be called, in no family's words."""

    mode: Literal["none", "auto", "must"] = "auto"
    names: tuple[str, ...] | None = None  # None: any of them
    many: bool = True


class Demand(Protocol):
    """A tool_choice that names tools, in a family's own form."""

    def named(self) -> Choice: ...


def choice(said: str | Demand | None, parallel: bool | None) -> Choice:
    """OpenAI's tool_choice and parallel_tool_calls."""
    many = parallel is not False
    match said:
        case None | "auto":
            return Choice("auto", many=many)
        case "none":
            return Choice("none")
        case "required":
            return Choice("must", many=many)
    assert not isinstance(said, str)
    chosen = said.named()
    return replace(chosen, many=chosen.many and many)


@dataclass(frozen=True)
class Toolbox:
    """What a model may call. `shown` goes into the prompt, `allowed` may be called."""

    shown: tuple[dict[str, Any], ...]
    allowed: tuple[dict[str, Any], ...]
    choice: Choice

    @property
    def binding(self) -> bool:
        """Whether its calls must follow a grammar."""
        strict = any(tool["function"].get("strict") for tool in self.allowed)
        return self.choice.mode == "must" or strict


def toolbox(tools: Sequence[Tool], choice: Choice, where: str = "tool_choice") -> Toolbox | None:
    """None: nothing is called. RequestError for a name that is no tool's or two's."""
    names = [tool.function.name for tool in tools]
    _check_names(names, choice, where)
    for i, tool in enumerate(tools):
        _check_schema(tool.function.parameters, f"tools[{i}]")
    if choice.mode == "none" or not tools:
        return None
    plain = [_plain(tool) for tool in tools]
    wanted = choice.names
    allowed = [t for t in plain if wanted is None or t["function"]["name"] in wanted]
    return Toolbox(tuple(plain), tuple(allowed), choice)


def _check_names(names: Sequence[str], choice: Choice, where: str) -> None:
    if len(names) > MAX_TOOLS:
        raise invalid(f"tools: more than {MAX_TOOLS}.", "tools")
    if len(set(names)) < len(names):
        raise invalid("tools: two of them have the same name.", "tools")
    if choice.mode == "must" and not names:
        raise invalid(f"{where}: needs tools.", where)
    if choice.names is not None and not (choice.names and set(choice.names) <= set(names)):
        raise invalid(f"{where}: names a tool that is not among tools.", where)


def _check_schema(schema: Mapping[str, Any] | None, where: str) -> None:
    if schema and schema.get("type", "object") != "object":
        raise invalid(f"{where}: the arguments' schema must be of type object.", where)


def _plain(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True, include=set(Function.model_fields))
    return {"type": "function", "function": function}


def for_template(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As models were trained to read them: without what concerns the server only."""
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
        for tool in tools
    ]


def bound(request: Request, box: Toolbox | None, dialect: Dialect) -> Request:
    """The request, bound to what its tools demand. An answer that is free but for having one call at most
    ends where the call does."""
    if box is None:
        return request
    if box.binding or request.grammar or not (box.choice.many or dialect.tools[1]):
        return replace(request, grammar=_grammar(box, request.grammar))
    end = () if box.choice.many else (dialect.tools[1],)
    return replace(request, stop=(*request.stop, *end))


def _grammar(box: Toolbox, form: Grammar | None) -> Grammar:
    """Of an answer that may call tools and otherwise has a form."""
    must = box.choice.mode == "must"
    answer = None
    if form is not None and not must:
        if form.kind != "json_schema":
            message = f"{form.field}: beside tools only JSON schemas can be asked for."
            raise invalid(message, form.field, "unsupported_value")
        answer = form.source
    wanted = {"tools": box.allowed, "must": must, "many": box.choice.many, "answer": answer}
    name = "tool_choice" if must else form.field if form else "tools"
    return Grammar("tools", json.dumps(wanted), name)
