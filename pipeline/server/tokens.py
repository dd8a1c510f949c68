"""Text to tokens and back, without generating: /tokenize, /detokenize, /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pipeline.server.body import VALUES, read_body
from pipeline.server.contract import ServedEngine
from pipeline.server.conversation import Message, plain_messages
from pipeline.server.endpoint import bounds
from pipeline.server.errors import JSON, invalid
from pipeline.server.messages import prompt
from pipeline.server.messages_schema import CountBody
from pipeline.server.neutral import check_neutral, warning
from pipeline.server.pools import Pools
from pipeline.server.schema import B, Body, Many, TemplateArgs, read
from pipeline.server.settings import ServerSettings
from pipeline.server.tools import Choice, Tool, for_template, toolbox

MOST = VALUES - 64  # tokens of one reply: a body of /detokenize has room for them
INPUTS = ("prompt", "content", "messages")  # of /tokenize: one of them


class TokenizeBody(Body):
    """vLLM's fields; `content` and `add_special` are llama.cpp's names."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateArgs = Field(default=None, validate_default=True)


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Many[Annotated[int, Field(ge=0)]]


@dataclass(frozen=True)
class Tokens:
    """Endpoints that need the tokenizer alone; long texts are worked on beside the event loop."""

    engine: ServedEngine
    settings: ServerSettings
    pools: Pools

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        unknown = check_neutral(body.model_extra)
        return await self.pools.tokens(self._tokenized, body, warning(unknown))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        unknown = check_neutral(body.model_extra)
        text = await self.pools.tokens(self._text, body.tokens)
        return JSON({"prompt": text, "content": text}, headers=warning(unknown))

    async def count(self, request: Request) -> Response:
        """What a message's request would have as input, in tokens."""
        limits = bounds(self.engine, self.settings, request)
        messages, args, _, ignored = await read_body(
            request, self.settings, self.pools, lambda value: prompt(read(CountBody, value), limits)
        )
        ids = await self.pools.tokens(self.engine.tokenizer.render, messages, args)
        return JSON({"input_tokens": len(ids)}, headers=warning(ignored))

    async def _body(self, request: Request, kind: type[B]) -> B:
        return await read_body(request, self.settings, self.pools, partial(read, kind))

    def _tokenized(self, body: TokenizeBody, headers: dict[str, str]) -> Response:
        ids = self._ids(body)
        if len(ids) > MOST:
            field = next(name for name in INPUTS if getattr(body, name) is not None)
            message = f"{field}: has {len(ids)} tokens; one reply has {MOST} at most."
            raise invalid(message, field, "body_too_complex")
        reply = {"tokens": ids, "count": len(ids)}
        reply["max_model_len"] = self.engine.target_info["context_len"]
        if body.return_token_strs:
            reply["token_strs"] = self._spelled(ids)
        return JSON(reply, headers=headers)

    def _text(self, ids: Sequence[int]) -> str:
        size = self.engine.target_info["vocab_size"]
        if not all(token < size for token in ids):
            raise invalid(f"tokens: a token id is not in 0..{size - 1}.", "tokens")
        return self.engine.tokenizer.decode(ids)

    def _spelled(self, ids: Sequence[int]) -> list[str]:
        spelled = map(self.engine.tokenizer.token_bytes, ids)
        return [data.decode("utf-8", "replace") for data in spelled]

    def _ids(self, body: TokenizeBody) -> list[int]:
        given = [v for name in INPUTS if (v := getattr(body, name)) is not None]
        if len(given) != 1:
            raise invalid("prompt: give exactly one of prompt, content and messages.", "prompt")
        if body.messages is None:
            special = _first(body.add_special_tokens, body.add_special, body.content is None)
            return self.engine.tokenizer.encode(given[0], add_special=special)
        messages, _ = plain_messages(body.messages)
        box = toolbox(body.tools or [], Choice())
        args = body.chat_template_kwargs | ({"tools": for_template(box.shown)} if box else {})
        reply = body.add_generation_prompt is not False
        return self.engine.tokenizer.render(messages, args, reply=reply)


def _first(*values: bool | None) -> bool:
    """The first that is said."""
    return next(value for value in values if value is not None)


def routes_of(tokens: Tokens) -> dict[str, Any]:
    """Path to endpoint."""
    return {
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
        "/v1/messages/count_tokens": tokens.count,
    }
