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
        self,
        tools: Seq[Mapping[str, Any]],
        *,
        must: bool,
        many: bool,
        answer: Mapping[str, Any] | None,
    ) -> str:
        return str(self._ask("grammar", tools=tools, must=must, many=many, answer=answer))

    def opened(self, header_ids: Seq[int]) -> bool:
        return bool(self._ask("opened", header_ids=header_ids))

    def thought(self, ids: Seq[int], inside: bool) -> int:
        return int(self._ask("thought", ids=ids, inside=inside))


class FarText:
    """A `Tokenizer`. `known` has the bytes of the tokens that events have named."""

    def __init__(self, facts: Text, ask: Ask):
        self._ask = ask
        self.template, self.identity = facts.template, facts.identity
        self.special_ids = facts.special_ids
        self.dialect: Dialect = FarDialect(facts.dialect, ask)
        self.known: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(self._ask("encode", text=text, add_special=add_special))

    def render(
        self, messages: Seq[Mapping[str, Any]], args: Mapping[str, Any], *, reply: bool = True
    ) -> list[int]:
        return list(self._ask("render", messages=messages, args=args, reply=reply))

    def decode(self, ids: Seq[int]) -> str:
        return str(self._ask("decode", ids=ids))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id not in self.known:
            self.hear({token_id: self._ask("spell", token_id=token_id)})
        return self.known[token_id]

    def hear(self, spelled: Mapping[int, str]) -> None:
        self.known.update((token, data.encode("latin-1")) for token, data in spelled.items())

    def decoder(self, shown: frozenset[int] = frozenset()) -> StreamDecoder:
        raise NotImplementedError("text is decoded where the tokens are")
