"""The protocols of text: what every target's tokenizer can do, and how its family speaks."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol


class StreamDecoder(Protocol):
    """Turns ids into text piece by piece. Joined pieces equal the one-shot decode of all ids,
    whatever the split; no piece ends in the middle of a character."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


@dataclass(frozen=True)
class ToolCall:
    """A call as a model wrote it: `arguments` is the JSON text of an object, `id` the model's own, if any."""

    name: str
    arguments: str
    id: str | None = None


class Dialect(Protocol):
    """How a family marks what is no plain answer. Marks are text; some are special tokens, whose text is
    delivered where a request has `marks`."""

    reasoning: (
        tuple[str, str] | None
    )  # around reasoning, at an answer's beginning; None: it has none
    reasoning_ids: Seq[list[int]]  # of both marks; empty without
    tools: tuple[str, str]  # around calls; an empty second: they go on to the end
    native: bool  # the chat template takes tools; else a generic prompt asks for them
    reads: frozenset[str]  # names that the chat template looks at
    short_ids: bool  # its template wants ids of calls of nine letters and digits
    shown: frozenset[int]  # special ids that are parts of marks

    def calls(self, text: str, tools: Seq[Mapping[str, Any]]) -> list[ToolCall]:
        """What stands between the marks of `tools`; ValueError where it is no call."""

    def grammar(
        self,
        tools: Seq[Mapping[str, Any]],
        *,
        must: bool,
        many: bool,
        answer: str | None,
    ) -> str:
        """Lark for an answer that is calls (`must`), or may have some; `answer` is the JSON schema, as text,
        of one that has none: ValueError where it is none. Arguments are bound by schemas of strict tools, and of
        all if it `must`."""

    def opened(self, header_ids: Seq[int]) -> bool:
        """Whether a prompt that ends with these ids leaves the answer in the middle of reasoning."""


class Tokenizer(Protocol):
    """Text to ids and back; safe on any thread, holds no device arrays."""

    template: str | None  # chat template source; None: a base model
    identity: str  # digest of vocabulary, merges, template and special tokens
    special_ids: frozenset[int]  # ids with a meaning of their own, which give no text
    dialect: Dialect

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; a BOS the text already starts with is not doubled."""

    def render(
        self, messages: Seq[Mapping[str, Any]], args: Mapping[str, Any], *, reply: bool = True
    ) -> list[int]:
        """Ids of a chat, with the header of the assistant's turn if `reply`. `args` are given to the
        template; `tools` among them reach a template that knows none as text.
        RequestError (400) where there is no template or the template refuses."""

    def decode(self, ids: Seq[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens included by their text."""

    def decoder(self, shown: frozenset[int] = frozenset()) -> StreamDecoder:
        """`shown`: special ids that do give text."""
