"""POST /v1/messages, as Anthropic's clients speak it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from pipeline.errors import RequestError
from pipeline.grammars import make_grammar
from pipeline.server.answer import Answer
from pipeline.server.asked import Asked, Bounds, wanted_adapter
from pipeline.server.body import parse_object, refuse_complex_chat
from pipeline.server.contract import ServedEngine
from pipeline.server.conversation import Plain, named_results
from pipeline.server.errors import Fault, invalid
from pipeline.server.messages_schema import (
    CountBody,
    MessagesBody,
    TextBlock,
    Thinking,
    ToolResult,
    ToolUse,
    Turn,
)
from pipeline.server.neutral import check_neutral
from pipeline.server.pools import Pools
from pipeline.server.schema import read
from pipeline.server.speech import CallBegins, CallText, Content, Piece, Reasoning
from pipeline.server.store import ResponseStore
from pipeline.server.thinking import thinking
from pipeline.server.tools import Choice, Function, Tool, Toolbox, bound, for_template, toolbox
from pipeline.server.voices import Call, News, voices
from pipeline.server.writer import frame
from pipeline.types import Done, Grammar, ReasoningBudget, Request, Sampling

Keep = Callable[[Plain], Awaitable[None]]
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


@dataclass(frozen=True)
class AskedMessage(Asked):
    """With the chat that leads to the answer, but for its system message."""

    history: tuple[Plain, ...] = ()


@dataclass(frozen=True)
class Messages:
    """The family of messages. The store has the chats of threads."""

    store: ResponseStore
    pools: Pools

    def read(self, value: Mapping[str, Any], bounds: Bounds) -> AskedMessage:
        body = read(MessagesBody, value)
        before = self._before(body, bounds.caller.name)
        messages, args, box, ignored = prompt(body, bounds, before)
        if before:
            refuse_complex_chat(messages, "thread.previous_message_id")
        user = body.metadata.user_id if body.metadata else None
        request = Request(
            id=f"msg_{uuid4().hex}",
            messages=messages,
            sampling=Sampling(body.temperature, body.top_p, body.top_k, seed=body.seed),
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences or ()),
            grammar=_form(body),
            reasoning_budget=_thinking(body, bounds)[1],
            template_args=args,
            marks=True,
            adapter=wanted_adapter(body.adapter, body.model, bounds),
            **bounds.caller.asks(user, body.priority, body.session_id),
        )
        request = bound(request, box, bounds.dialect)
        if body.priority and not bounds.priorities:
            ignored.append("priority")
        history = tuple(m for m in messages[:1] if m["role"] != "system") + messages[1:]
        said = (request.id, (request,), body, 1, bool(body.stream), tuple(ignored), box)
        return AskedMessage(*said, bounds.caller.name, history=history)

    async def writer(self, answer: Answer, engine: ServedEngine) -> MessageWriter:
        asked = answer.asked
        assert isinstance(asked, AskedMessage)

        async def keep(reply: Plain) -> None:
            record = {"messages": [*asked.history, reply]}
            await self.pools.answer(self.store.put, asked.owner, asked.id, record)

        held = asked.body.thread is not None  # type: ignore[attr-defined]
        return MessageWriter(answer, engine, keep if held else None)

    def _before(self, body: MessagesBody, owner: str) -> Sequence[Plain]:
        """What a thread's earlier requests have said and got."""
        thread = body.thread
        if thread is None or thread.type == "create":
            return ()
        name, where = thread.previous_message_id or "", "thread.previous_message_id"
        record = self.store.get(owner, name) if name.startswith("msg_") else None
        if record is None:
            message = f"{where}: no such message; it may have expired."
            raise RequestError(message, param=where, code="not_found", status=404)
        return list(record["messages"])


def prompt(
    body: CountBody, bounds: Bounds, before: Sequence[Plain] = ()
) -> tuple[tuple[Plain, ...], dict[str, Any], Toolbox | None, list[str]]:
    """The chat, the template's arguments, the tools, and what has no effect."""
    box = toolbox([_tool(tool) for tool in body.tools or ()], _choice(body))
    args, _ = _thinking(body, bounds)
    if box:
        args["tools"] = for_template(box.shown)
    messages = [{"role": "system", "content": _joined(body.system)}] if body.system else []
    messages += before
    for i, turn in enumerate(body.messages):
        messages += _plain(turn, f"messages[{i}]")
    return tuple(named_results(messages)), args, box, check_neutral(body.model_extra)


def _thinking(body: CountBody, bounds: Bounds) -> tuple[dict[str, Any], ReasoningBudget | None]:
    effort = body.output_config.effort if body.output_config else None
    config = body.thinking
    if config is None:
        return thinking(effort, bounds.dialect, "output_config.effort")
    if config.type == "disabled":
        return thinking("none", bounds.dialect, "thinking")
    if config.type == "adaptive" and not bounds.dialect.reasoning:
        return {}, None  # as much as it can: none
    args, level = thinking(effort or "high", bounds.dialect, "thinking")
    if config.budget_tokens:
        return args, ReasoningBudget(config.budget_tokens, "thinking.budget_tokens")
    return args, level if effort else None


def _form(body: CountBody) -> Grammar | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    return make_grammar("json_schema", config.format.form, "output_config")


def _tool(tool: Any) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(body: CountBody) -> Choice:
    chosen = body.tool_choice
    if chosen is None:
        return Choice()
    many = chosen.disable_parallel_tool_use is not True
    if chosen.type == "tool":
        if chosen.name is None:
            raise invalid("tool_choice.name: is missing.", "tool_choice.name")
        return Choice("must", (chosen.name,), many=False)
    modes: dict[str, Any] = {"auto": "auto", "any": "must", "none": "none"}
    return Choice(modes[chosen.type], many=many)


def _joined(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _plain(turn: Turn, where: str) -> Iterator[Plain]:
    """A turn's blocks as chat messages: results of tools first, each its own message."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    wanted = (ToolUse, Thinking) if turn.role == "assistant" else (ToolResult,)
    for i, block in enumerate(turn.content):
        if isinstance(block, ToolUse | ToolResult | Thinking) and not isinstance(block, wanted):
            message = f"{where}.content[{i}].type: not in a message of role {turn.role}."
            raise invalid(message, f"{where}.content[{i}].type")
    yield from (_result(block) for block in turn.content if isinstance(block, ToolResult))
    text = "\n".join(block.text for block in turn.content if isinstance(block, TextBlock))
    thought = "\n".join(block.thinking for block in turn.content if isinstance(block, Thinking))
    calls = [_called(block) for block in turn.content if isinstance(block, ToolUse)]
    if text or calls or thought or turn.role == "assistant":
        more = {"tool_calls": calls, "reasoning_content": thought}
        yield {"role": turn.role, "content": text, **{k: v for k, v in more.items() if v}}


def _called(block: ToolUse) -> Plain:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResult) -> Plain:
    """A failure is told in words: chat templates know no other way."""
    text = _joined(block.content)
    text = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


class MessageWriter:
    """Blocks one after another: each begins, grows and stops before the next."""

    def __init__(self, answer: Answer, engine: ServedEngine, keep: Keep | None):
        self.voices = voices(answer, engine, "toolu_")
        self._keep = keep
        self._answer, self._model = answer, engine.target_info["name"]
        self._open: type[Piece] | None = None  # what the block that grows is made of
        self._blocks = 0

    def opening(self) -> Iterable[bytes]:
        usage = {"input_tokens": self._answer.choices[0].prompt_tokens, "output_tokens": 0}
        message = {**self._message([], None, None), "usage": usage}
        yield _event("message_start", message=message)

    def news(self, index: int, news: News) -> Iterable[bytes]:
        for piece in news.pieces:
            kind = CallBegins if isinstance(piece, CallText) else type(piece)
            if kind is not self._open or isinstance(piece, CallBegins):
                yield from self._stop()
                self._open = kind
                yield _event("content_block_start", index=self._blocks, content_block=_empty(piece))
            if delta := _delta(piece):
                yield _event("content_block_delta", index=self._blocks, delta=delta)

    def ended(self, index: int, done: Done) -> Iterable[bytes]:
        yield from self._stop()
        reason, stop = self._stopped(done)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield _event("message_delta", delta=delta, usage=self._usage(done))

    async def closing(self) -> Iterable[bytes]:
        await self._hold()
        return [_event("message_stop")]

    def failed(self, fault: Fault) -> Iterable[bytes]:
        yield frame(fault.anthropic(), "error")

    async def whole(self) -> dict[str, Any]:
        (voice,) = self.voices
        assert voice.done is not None
        await self._hold()
        message = self._message(list(map(_block, voice.said)), *self._stopped(voice.done))
        return {**message, "usage": self._usage(voice.done)}

    async def _hold(self) -> None:
        if self._keep is not None:
            await self._keep(self.voices[0].turn)

    def _stop(self) -> Iterable[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._blocks)
            self._blocks, self._open = self._blocks + 1, None

    def _stopped(self, done: Done) -> tuple[str, str | None]:
        asked: Any = self._answer.asked.body
        if done.stop_string in (asked.stop_sequences or ()):
            return "stop_sequence", done.stop_string
        return STOP_REASONS[self.voices[0].finish_reason], None

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, stop: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._answer.asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    def _usage(self, done: Done) -> dict[str, Any]:
        """Anthropic counts what came from a cache apart from the input."""
        usage = done.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "resumed_tokens": usage.resumed_tokens,
        }


def _event(kind: str, **data: Any) -> bytes:
    return frame({"type": kind, **data}, kind)


def _empty(piece: Piece) -> dict[str, Any]:
    match piece:
        case CallBegins(id, name):
            return {"type": "tool_use", "id": id, "name": name, "input": {}}
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(piece: Piece) -> dict[str, Any] | None:
    match piece:
        case Content(text):
            return {"type": "text_delta", "text": text}
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case CallText(text):
            return {"type": "input_json_delta", "partial_json": text}
    return None


def _block(part: Content | Reasoning | Call) -> dict[str, Any]:
    match part:
        case Content(text):
            return {"type": "text", "text": text}
        case Reasoning(text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Call() as call:
            return _use(call)


def _use(call: Call) -> dict[str, Any]:
    """A call that was cut short has the arguments it can have: none. So has one that nobody could read, a
    thousand lists in each other, say."""
    try:
        arguments = parse_object((call.arguments or "{}").encode())
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
