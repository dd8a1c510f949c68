"""What chat and text completions call the same things."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from pipeline.server.logprobs import ChatLogprobs, Logprobs, TextLogprobs
from pipeline.types import Tokenizer


class Shape(Protocol):
    """One endpoint's words. Methods give the part of a choice that differs."""

    whole_name: str
    chunk_name: str
    one_prompt: bool  # a reply is about one prompt: what is said of it stands beside the choices

    def opening(self) -> dict[str, Any] | None:
        """A stream's first chunk, before any token; None: there is none."""
        ...

    def delta(self, text: str) -> dict[str, Any]: ...
    def ending(self) -> dict[str, Any]: ...
    def whole(self, text: str) -> dict[str, Any]: ...
    def logprobs(self, tokenizer: Tokenizer, eos_ids: Collection[int], top: int) -> Logprobs: ...


class ChatShape:
    """/v1/chat/completions"""

    whole_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    one_prompt = True

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokenizer: Tokenizer, eos_ids: Collection[int], top: int) -> Logprobs:
        return ChatLogprobs(tokenizer, eos_ids, top)


class TextShape:
    """/v1/completions"""

    whole_name = "text_completion"
    chunk_name = "text_completion"
    one_prompt = False

    def opening(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def ending(self) -> dict[str, Any]:
        return {"text": ""}

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, tokenizer: Tokenizer, eos_ids: Collection[int], top: int) -> Logprobs:
        return TextLogprobs(tokenizer, top)
