"""The protocols of text: what every target's tokenizer can do."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Protocol


class StreamDecoder(Protocol):
    """Turns ids into text piece by piece. Joined pieces equal the one-shot decode of all ids,
    whatever the split; no piece ends in the middle of a character."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """Text to ids and back; safe on any thread, holds no device arrays."""

    template: str | None  # chat template source; None: a base model
    identity: str  # digest of vocabulary, merges, template and special tokens
    special_ids: frozenset[int]  # ids with a meaning of their own, which give no text

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; a BOS the text already starts with is not doubled."""

    def render(
        self, messages: Seq[Mapping[str, Any]], args: Mapping[str, Any], *, reply: bool = True
    ) -> list[int]:
        """Ids of a chat, with the header of the assistant's turn if `reply`.
        RequestError (400) where there is no template or the template refuses."""

    def decode(self, ids: Seq[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens included by their text."""

    def decoder(self) -> StreamDecoder: ...
