"""The tokenizer of an engine in another process. What is constant is known here; the rest is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.isolate.wire import Text
from pipeline.types import Dialect, ToolCall
from pipeline.types.text import StreamDecoder

Ask = Callable[..., Any]


class FarDialect:
    """A `Dialect`."""

    def __init__(self, facts: Mapping[str, Any], ask: Ask):
        self._ask = ask
        self.reasoning: tuple[str, str] | None = facts["reasoning"] and tuple(facts["reasoning"])
        self.reasoning_ids: Seq[list[int]] = facts["reasoning_ids"]
        begin, end = facts["tools"]
        self.tools: tuple[str, str] = (begin, end)
        self.native: bool = facts["native"]
        self.reads: frozenset[str] = frozenset(facts["reads"])
        self.short_ids: bool = facts["short_ids"]
        self.shown: frozenset[int] = frozenset(facts["shown"])

    def calls(self, text: str, tools: Seq[Mapping[str, Any]]) -> list[ToolCall]:
        return [ToolCall(**call) for call in self._ask("calls", text=text, tools=tools)]

    def grammar(
        self, tools: Seq[Mapping[str, Any]], *, must: bool, many: bool, answer: str | None
    ) -> str:
        raise NotImplementedError("grammars are made where they are followed")

    def opened(self, header_ids: Seq[int]) -> bool:
        raise NotImplementedError("`Accepted` tells it")


class FarText:
    """A `Tokenizer`. Questions wait for that process: never on an event loop. `ask_on` outlives it where
    answers do."""

    def __init__(self, facts: Text, ask: Ask, ask_on: Ask):
        self._ask = ask
        self.template, self.identity = facts.template, facts.identity
        self.special_ids = facts.special_ids
        self.dialect: Dialect = FarDialect(facts.dialect, ask_on)
        self._vocabulary = [word.encode("latin-1") for word in facts.vocabulary]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(self._ask("encode", text=text, add_special=add_special))

    def render(
        self, messages: Seq[Mapping[str, Any]], args: Mapping[str, Any], *, reply: bool = True
    ) -> list[int]:
        return list(self._ask("render", messages=messages, args=args, reply=reply))

    def decode(self, ids: Seq[int]) -> str:
        return str(self._ask("decode", ids=ids))

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary[token_id] if 0 <= token_id < len(self._vocabulary) else b""

    def decoder(self, shown: frozenset[int] = frozenset()) -> StreamDecoder:
        raise NotImplementedError("text is decoded where the tokens are")
