"""No constraint: every token is allowed."""

from __future__ import annotations

from pipeline.types import Matcher, Request, Tokenizer


class NoConstraint:
    """The null object of constraints."""

    can = frozenset[str]()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def bind(self, request: Request, tokenizer: Tokenizer) -> Matcher | None:
        return None
