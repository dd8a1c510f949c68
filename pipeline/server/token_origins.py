"""Where each token of an answer came from, as `token_origins: true` has it told."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from pipeline.types import Origin, Tokenizer

Told = tuple[int, Origin]


class TokenOrigins:
    """One choice's formatter; called with its tokens in order, as they come.

    An entry's `text` is what the token completes, so that all texts joined are what the model wrote:
    marks of reasoning and calls, and a stop string, are in it.
    """

    def __init__(self, tokenizer: Tokenizer, *, marks: bool):
        shown = tokenizer.dialect.shown if marks else frozenset[int]()
        self._tokenizer, self._silent = tokenizer, tokenizer.special_ids - shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, told: Iterable[Told]) -> list[dict[str, Any]]:
        return [self._entry(token, origin) for token, origin in told]

    def _entry(self, token: int, origin: Origin) -> dict[str, Any]:
        data = b"" if token in self._silent else self._tokenizer.token_bytes(token)
        entry: dict[str, Any] = {"id": token, "text": self._decoder.decode(data)}
        entry["origin"] = origin.kind
        if origin.constrained:
            entry["constrained"] = True
        if origin.rejected:
            entry["rejected"] = [self._spelled(draft) for draft in origin.rejected]
        return entry

    def _spelled(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")
