"""Limits on counts and lengths; memory is not budgeted."""

from __future__ import annotations

from pipeline.errors import RequestError
from pipeline.types import KVPolicy, Target


class Advisory:
    """Bounds rows, queue, answer and context.

    `max_rows`: requests that decode together. `max_queue`: requests that wait; more get 429.
    `max_tokens`: cap on every answer. `context`: cap on prompt and answer together, where it should
    be below the model's own. ValueError names a setting that is out of range.
    """

    can = frozenset[str]()

    def __init__(
        self,
        *,
        max_rows: int = 8,
        max_queue: int = 64,
        max_tokens: int | None = None,
        context: int | None = None,
    ) -> None:
        self.max_rows = _at_least("max_rows", max_rows, 1)
        self.max_queue = _at_least("max_queue", max_queue, 0)
        self.max_tokens = None if max_tokens is None else _at_least("max_tokens", max_tokens, 1)
        self.context = None if context is None else _at_least("context", context, 2)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def admit(
        self, prompt_len: int, max_new: int, target: Target, kv: KVPolicy, param: str
    ) -> None:
        """RequestError if the prompt leaves no room for one token. `max_new` never refuses a request,
        it is a ceiling that the engine clamps. `param`: the field the prompt came in."""
        room = target.context_len if self.context is None else min(self.context, target.context_len)
        if prompt_len >= room:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the context is {room} tokens and at least 1 is "
                "needed for the answer",
                param=param,
                code="context_length_exceeded",
            )


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{name}: wants >= {least}, got {value}")
    return value
