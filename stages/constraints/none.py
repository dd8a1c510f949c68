"""No constraint: every token is allowed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from pipeline.errors import RequestError
from pipeline.types import Matcher, Request, Target
from stages.constraints.reasoning import after_reasoning


class Free:
    """The matcher of a row without a constraint."""

    free, done = True, False

    def mask(self, logits_V: Any) -> Any:
        return logits_V

    def push(self, token_id: int) -> None: ...

    def restart(self, output_ids: Seq[int]) -> None: ...

    def legal(self, token_ids: Seq[int]) -> int:
        return len(token_ids)

    def forced(self, limit: int) -> list[int]:
        return []


class NoConstraint:
    """The null object of constraints. RequestError for a request that asks for one."""

    can = frozenset[str]()

    def open(self) -> None: ...

    def close(self) -> None: ...

    def bind(self, request: Request, target: Target, thinking: bool) -> Matcher:
        if request.grammar is not None:
            field = request.grammar.field
            message = (
                f"{field}: this recipe takes no grammars; serve it with constraint=llguidance."
            )
            raise RequestError(message, param=field)
        return after_reasoning(Free(), request.reasoning_budget, target.tokenizer, thinking)
