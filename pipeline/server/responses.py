"""POST /v1/responses: items instead of messages, and answers that later requests go on from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pipeline.errors import RequestError
from pipeline.grammars import make_grammar
from pipeline.server.answer import Answer
from pipeline.server.asked import Asked, Bounds, wanted_adapter
from pipeline.server.body import refuse_complex_chat
from pipeline.server.caller import caller
from pipeline.server.contract import ServedEngine
from pipeline.server.conversation import (
    CalledFunction,
    Plain,
    call_for_template,
    named_results,
    refuse_complex_calls,
    text_of,
)
from pipeline.server.errors import JSON, invalid
from pipeline.server.grammars import ANY_OBJECT
from pipeline.server.neutral import check_neutral
from pipeline.server.pools import Pools
from pipeline.server.response_events import ResponseWriter
from pipeline.server.responses_schema import (
    ITEMS,
    FunctionCall,
    FunctionOutput,
    InputMessage,
    ReasoningItem,
    ResponsesBody,
    SchemaFormat,
    TextFormat,
)
from pipeline.server.schema import Body, read
from pipeline.server.store import ResponseStore
from pipeline.server.thinking import thinking
from pipeline.server.tools import Function, Tool, bound, choice, for_template, toolbox
from pipeline.types import Grammar, ReasoningBudget, Request, Sampling


@dataclass(frozen=True)
class AskedResponse(Asked):
    """With what the answer is stored under: the chat that led to it, and its own input."""

    history: tuple[Plain, ...] = ()  # without instructions
    items: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Responses:
    """The family of responses, over one store."""

    store: ResponseStore
    pools: Pools

    def read(self, value: Mapping[str, Any], bounds: Bounds) -> AskedResponse:
        body = read(ResponsesBody, value)
        items = _items(body.input)
        before = self._before(bounds.caller.name, body.previous_response_id)
        history = named_results([*before, *_chat(items)])
        if before:
            refuse_complex_chat(history, "previous_response_id")
        args, budget = _thinking(body, bounds)
        demand = choice(body.tool_choice, body.parallel_tool_calls)
        box = toolbox([_tool(tool) for tool in body.tools or ()], demand)
        if box:
            args["tools"] = for_template(box.shown)
        request = Request(
            id=f"resp_{uuid4().hex}",
            messages=_with_system(history, body.instructions),
            sampling=Sampling(body.temperature, body.top_p, seed=body.seed),
            max_tokens=body.max_output_tokens,
            logprobs=_logprobs(body),
            grammar=_form(body),
            reasoning_budget=budget,
            template_args=args,
            marks=True,
            adapter=wanted_adapter(body.adapter, body.model, bounds),
            **bounds.caller.asks(body.user, body.priority, body.session_id),
        )
        request = bound(request, box, bounds.dialect)
        ignored = check_neutral(body.model_extra, {"prompt": ()})
        if body.priority and not bounds.priorities:
            ignored.append("priority")
        said = (request.id, (request,), body, 1, bool(body.stream), tuple(ignored), box)
        told = tuple(item.model_dump(exclude_none=True) for item in items)
        owner = bounds.caller.name
        return AskedResponse(*said, owner, history=tuple(history), items=told)

    async def writer(self, answer: Answer, engine: ServedEngine) -> ResponseWriter:
        asked = answer.asked
        assert isinstance(asked, AskedResponse)

        async def keep(response: dict[str, Any], reply: Plain) -> None:
            record = {"messages": [*asked.history, reply], "response": response}
            record["input"] = asked.items
            await self.pools.answer(self.store.put, asked.owner, asked.id, record)

        stored = asked.body.store is not False  # type: ignore[attr-defined]
        return ResponseWriter(answer, engine, keep if stored else None)

    async def stored(self, request: HTTPRequest) -> Response:
        """GET and DELETE /v1/responses/{id}"""
        answer = self._deleted if request.method == "DELETE" else self._shown
        return await self._beside(answer, request)

    async def input_items(self, request: HTTPRequest) -> Response:
        """GET /v1/responses/{id}/input_items"""
        return await self._beside(self._inputs, request)

    async def _beside(
        self, answer: Callable[[str, str], Response], request: HTTPRequest
    ) -> Response:
        """Beside the event loop: an answer is as large as it was stored."""
        return await self.pools.answer(answer, caller(request).name, request.path_params["name"])

    def _shown(self, owner: str, name: str) -> Response:
        return JSON(self._found(owner, name)["response"])

    def _deleted(self, owner: str, name: str) -> Response:
        self._found(owner, name)
        self.store.delete(owner, name)
        return JSON({"id": name, "object": "response", "deleted": True})

    def _inputs(self, owner: str, name: str) -> Response:
        told = self._found(owner, name)["input"]
        items = [{"id": f"item_{i}_{name}", **item} for i, item in enumerate(told)]
        ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"], "has_more": False}
        return JSON({"object": "list", "data": items, **ids})

    def _before(self, owner: str, name: str | None) -> list[Plain]:
        if name is None:
            return []
        return list(self._found(owner, name, "previous_response_id")["messages"])

    def _found(self, owner: str, name: str, param: str = "response_id") -> dict[str, Any]:
        record = self.store.get(owner, name) if name.startswith("resp_") else None
        if record is None:
            message = f"{param}: no such response; it may have expired."
            raise RequestError(message, param=param, code="not_found", status=404)
        return record


def _items(value: str | list[dict[str, Any]]) -> list[Body]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_item(item, f"input[{i}]") for i, item in enumerate(value)]


def _item(value: dict[str, Any], where: str) -> Body:
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        message = f"{where}.type: wants one of {', '.join(ITEMS)}."
        raise invalid(message, f"{where}.type", "unsupported_value")
    return read(ITEMS[kind], value, where)


def _chat(items: Sequence[Body]) -> list[Plain]:
    """Items as chat messages: what an assistant said and called in a row is one of its turns."""
    refuse_complex_calls(item for item in items if isinstance(item, FunctionCall))
    found: list[Plain] = []
    for i, item in enumerate(items):
        message = _message(item, f"input[{i}]")
        last = found[-1] if found else {"role": ""}
        if message["role"] == "assistant" == last["role"]:
            found[-1] = _merged(last, message)
        else:
            found.append(message)
    return found


def _message(item: Body, where: str) -> Plain:
    match item:
        case InputMessage(role=role, content=content):
            role = "system" if role == "developer" else role
            return {"role": role, "content": _text(content, f"{where}.content")}
        case FunctionCall(call_id=call_id, name=name, arguments=arguments):
            call = call_for_template(call_id, CalledFunction(name=name, arguments=arguments))
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case FunctionOutput(call_id=call_id, output=output):
            text = _text(output, f"{where}.output")
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case ReasoningItem(content=content):
            thought = "\n".join(part.text for part in content or ())
            return {"role": "assistant", "content": "", "reasoning_content": thought}
    raise AssertionError(item)


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(text_of(part, f"{where}[{i}]") for i, part in enumerate(content))


def _merged(first: Plain, second: Plain) -> Plain:
    merged = {**first, **second, "content": first["content"] + second["content"]}
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    return merged


def _with_system(messages: Iterable[Plain], instructions: str | None) -> tuple[Plain, ...]:
    """Instructions and all system messages as the one that chat templates take, at the front."""
    messages = list(messages)
    words = [m["content"] for m in messages if m["role"] == "system"]
    words = [instructions, *words] if instructions else words
    rest = [m for m in messages if m["role"] != "system"]
    return tuple([{"role": "system", "content": "\n\n".join(words)}, *rest] if words else rest)


def _tool(tool: Any) -> Tool:
    names = ("name", "description", "parameters", "strict")
    return Tool(type="function", function=Function(**{n: getattr(tool, n) for n in names}))


def _form(body: ResponsesBody) -> Grammar | None:
    match body.text.format if body.text else None:
        case SchemaFormat(form=schema):
            return make_grammar("json_schema", schema, "text.format")
        case TextFormat(type="json_object"):
            return make_grammar("json_schema", ANY_OBJECT, "text.format")
    return None


def _logprobs(body: ResponsesBody) -> int | None:
    if "message.output_text.logprobs" in (body.include or ()):
        return body.top_logprobs or 0
    if body.top_logprobs:
        message = "top_logprobs: needs message.output_text.logprobs in include."
        raise invalid(message, "top_logprobs")
    return None


def _thinking(body: ResponsesBody, bounds: Bounds) -> tuple[dict[str, Any], ReasoningBudget | None]:
    effort = body.reasoning.effort if body.reasoning else None
    return thinking(effort, bounds.dialect, "reasoning.effort")
