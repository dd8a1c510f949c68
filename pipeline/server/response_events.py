"""The object and the events of /v1/responses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pipeline.server.answer import Answer
from pipeline.server.contract import ServedEngine
from pipeline.server.conversation import Plain
from pipeline.server.errors import Fault
from pipeline.server.logprobs import ChatLogprobs, ShownLogprobs
from pipeline.server.speech import CallBegins, CallText, Content, Piece, Reasoning
from pipeline.server.voices import News, voices
from pipeline.server.writer import frame
from pipeline.types import Done

Item = dict[str, Any]
Keep = Callable[[dict[str, Any], Plain], Awaitable[None]]


class ResponseWriter:
    """Items one after another: each is added, grows, and is done before the next. `keep` gets the complete
    response and the assistant's turn, where it is to be stored."""

    def __init__(self, answer: Answer, engine: ServedEngine, keep: Keep | None):
        self.voices = voices(answer, engine)
        self._asked, self._model, self._keep = answer.asked, engine.target_info["name"], keep
        self._created = int(time.time())
        self._number = 0  # of the next event
        self._items: list[Item] = []
        self._open: type[Piece] | None = None
        self._logprobs = _logprobs(answer, engine)

    # --- the stream

    def opening(self) -> Iterable[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def news(self, index: int, news: News) -> Iterable[bytes]:
        self._logprobs.hear(news.entries)
        for piece in news.pieces:
            kind = CallBegins if isinstance(piece, CallText) else type(piece)
            if kind is not self._open or isinstance(piece, CallBegins):
                yield from self._finish("completed")
                yield from self._begin(piece)
                self._open = kind
            if not isinstance(piece, CallBegins):
                yield self._grow(piece)

    def ended(self, index: int, done: Done) -> Iterable[bytes]:
        yield from self._finish(_status(done))

    async def closing(self) -> Iterable[bytes]:
        response = await self._complete()
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, fault: Fault) -> Iterable[bytes]:
        told = {"code": fault.code or fault.type, "message": fault.message, "param": fault.param}
        yield self._event("error", **told)
        error = {"code": "server_error", "message": fault.message}
        yield self._event("response.failed", response=self._response("failed") | {"error": error})

    # --- the object

    async def whole(self) -> dict[str, Any]:
        """Made of the same steps as the stream, so that both have the same items."""
        (voice,) = self.voices
        assert voice.done is not None
        for _ in [*self.news(0, News(voice.pieces, voice.entries)), *self.ended(0, voice.done)]:
            pass
        return await self._complete()

    async def _complete(self) -> dict[str, Any]:
        (voice,) = self.voices
        done = voice.done
        assert done is not None
        status = _status(done)
        response = self._response(status) | {"usage": _usage(done, voice.reasoning_tokens)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["headrace"] = {"seed": done.seed, "timings": dict(done.timings)}
        if self._keep is not None:
            await self._keep(response, voice.turn)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """All fields that clients look for; what was not said is null or what happens."""
        body: Any = self._asked.body
        return {
            "id": self._asked.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self._keep is not None,
            "temperature": body.temperature,
            "text": _said(body.text) or {"format": {"type": "text"}},
            "tool_choice": _said(body.tool_choice) or "auto",
            "top_logprobs": body.top_logprobs or 0,
            "tools": [_said(tool) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    # --- items

    def _begin(self, piece: Piece) -> Iterable[bytes]:
        item = _new_item(piece, f"{self._asked.id.removeprefix('resp_')}{len(self._items)}")
        shown = {**item, "content": []} if "content" in item else item
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=self._last, item=dict(shown))
        if "content" in item:
            yield self._part_event("added", dict(item["content"][0]))

    def _grow(self, piece: Piece) -> bytes:
        item = self._items[-1]
        assert not isinstance(piece, CallBegins)
        entries = self._logprobs.take(piece.text)
        if isinstance(piece, CallText):
            item["arguments"] += piece.text
            return self._text_event(piece, "delta", delta=piece.text)
        part = item["content"][0]
        grown = {**part, "text": part["text"] + piece.text}
        shown: dict[str, Any] = {}
        if isinstance(piece, Content):
            shown = {"logprobs": entries}
            grown["logprobs"] = part["logprobs"] + entries
        item["content"] = [grown]
        return self._text_event(piece, "delta", delta=piece.text, **shown)

    def _finish(self, status: str) -> Iterable[bytes]:
        if self._open is None:
            return
        item = self._items[-1]
        self._items[-1] = item = {**item, "status": status}
        if self._open is CallBegins:
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield self._text_event(CallText(""), "done", **whole)
        else:
            part = item["content"][0]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._text_event(self._open(part["text"]), "done", **said)  # type: ignore[call-arg]
            yield self._part_event("done", part)
        yield self._event("response.output_item.done", output_index=self._last, item=item)
        self._open = None

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _text_event(self, piece: Piece, step: str, **data: Any) -> bytes:
        names = {CallText: "function_call_arguments", Reasoning: "reasoning_text"}
        name = names.get(type(piece), "output_text")
        where = {} if isinstance(piece, CallText) else {"content_index": 0}
        return self._item_event(f"response.{name}.{step}", **where, **data)

    def _part_event(self, step: str, part: Mapping[str, Any]) -> bytes:
        return self._item_event(f"response.content_part.{step}", content_index=0, part=part)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._last, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return frame({"type": kind, "sequence_number": self._number - 1, **data}, kind)


def _new_item(piece: Piece, word: str) -> Item:
    match piece:
        case Reasoning():
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{word}", "type": "reasoning", "summary": [], "content": [part]}
        case CallBegins(call_id, name):
            item = {"id": f"fc_{word}", "type": "function_call", "call_id": call_id}
            item |= {"name": name, "arguments": ""}
        case _:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{word}", "type": "message", "role": "assistant", "content": [part]}
    return {**item, "status": "in_progress"}


def _logprobs(answer: Answer, engine: ServedEngine) -> ShownLogprobs:
    """Of no token where none were asked for."""
    top = answer.asked.requests[0].logprobs or 0
    form = ChatLogprobs(engine.tokenizer, engine.target_info["eos_ids"], top)
    return ShownLogprobs(form, engine.tokenizer)


def _said(part: Any) -> Any:
    """A part of the body as the client wrote it."""
    dump = getattr(part, "model_dump", None)
    return part if dump is None else dump(exclude_none=True, by_alias=True)


def _status(done: Done) -> str:
    return "incomplete" if done.finish_reason == "length" else "completed"


def _usage(done: Done, thought: int) -> dict[str, Any]:
    usage = done.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "resumed_tokens": usage.resumed_tokens,
    }
