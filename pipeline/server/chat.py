"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from pipeline.server.answer import Answer
from pipeline.server.asked import Asked, Bounds, asked, base_request
from pipeline.server.contract import ServedEngine
from pipeline.server.conversation import Message, plain_messages
from pipeline.server.errors import invalid
from pipeline.server.logprobs import ChatLogprobs, Logprobs
from pipeline.server.replies import Chunks
from pipeline.server.schema import Body, Ceiling, Common, Count, Many, TemplateArgs, read
from pipeline.server.speech import CallBegins, CallText, Content, Piece, Reasoning
from pipeline.server.thinking import Effort, thinking, unread
from pipeline.server.tools import Choice, Name, Tool, bound, choice, for_template, toolbox
from pipeline.server.voices import Call, News, Voice
from pipeline.types import ReasoningBudget


class Named(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: Named

    def named(self) -> Choice:
        return Choice("must", (self.function.name,), many=False)


class AllowedSet(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[Many[NamedTool], Field(min_length=1)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet

    def named(self) -> Choice:
        names = tuple(tool.function.name for tool in self.allowed_tools.tools)
        return Choice("must" if self.allowed_tools.mode == "required" else "auto", names)


class ChatBody(Common):
    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Ceiling | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Many[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: Count | None = None
    chat_template_kwargs: TemplateArgs = Field(default=None, validate_default=True)


class Chat:
    """The family of chat completions."""

    def read(self, value: Mapping[str, Any], bounds: Bounds) -> Asked:
        body = read(ChatBody, value)
        messages, ignored = plain_messages(body.messages)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs: needs logprobs to be true.", "top_logprobs")
        box = toolbox(body.tools or [], choice(body.tool_choice, body.parallel_tool_calls))
        args, budget = thinking(body.reasoning_effort, bounds.dialect, "reasoning_effort")
        args |= body.chat_template_kwargs
        if body.thinking_budget is not None:
            budget = ReasoningBudget(body.thinking_budget, "thinking_budget")
        ignored += unread(body.chat_template_kwargs, bounds.dialect)
        if box:
            args["tools"] = for_template(box.shown)
        limit = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        base = base_request(body, f"chatcmpl-{uuid4().hex}", bounds)
        base = replace(
            base,
            messages=messages,
            max_tokens=limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            template_args=args,
            reasoning_budget=budget,
            marks=True,
        )
        base = bound(base, box, bounds.dialect)
        return asked(body, [base], bounds, ignored=ignored, tools=box)

    async def writer(self, answer: Answer, engine: ServedEngine) -> ChatWriter:
        return ChatWriter(answer, engine)


class ChatWriter(Chunks):
    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def logprobs(self, top: int) -> Logprobs:
        return ChatLogprobs(self.tokenizer, self.engine.target_info["eos_ids"], top)

    def opening(self) -> Iterable[bytes]:
        for index in range(len(self.voices)):
            yield self.chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def parts(self, index: int, news: News) -> list[dict[str, Any]]:
        call = self.voices[index].begun - sum(isinstance(p, CallBegins) for p in news.pieces)
        parts = []
        for kind, group in groupby(news.pieces, key=type):
            for delta in _deltas(kind, list(group), call):
                call += "id" in delta.get("tool_calls", [{}])[0]
                parts.append({"delta": delta})
        return parts

    def parts_of_nothing(self) -> dict[str, Any]:
        return {"delta": {"content": ""}}

    def ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def whole_choice(self, index: int, voice: Voice) -> dict[str, Any]:
        content = None if voice.calls and not voice.content else voice.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if voice.reasoning:
            message |= _reasoning(voice.reasoning)
        if voice.calls:
            message["tool_calls"] = [_whole_call(call) for call in voice.calls]
        return {"message": message}

    async def whole(self) -> dict[str, Any]:
        return {**await super().whole(), **self.prompt_scores(0)}


def _deltas(kind: type[Piece], pieces: list[Any], call: int) -> Iterable[dict[str, Any]]:
    """`call`: how many calls had begun before these pieces."""
    if kind is CallBegins:
        for i, piece in enumerate(pieces):
            function = {"name": piece.name, "arguments": ""}
            begun = {"index": call + i, "id": piece.id, "type": "function", "function": function}
            yield {"tool_calls": [begun]}
        return
    text = "".join(piece.text for piece in pieces)
    if kind is CallText:
        yield {"tool_calls": [{"index": call - 1, "function": {"arguments": text}}]}
    elif kind is Reasoning:
        yield _reasoning(text)
    elif kind is Content:
        yield {"content": text}


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _whole_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
