"""How much a model is to think, in the words of its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pipeline.server.errors import invalid
from pipeline.types import Dialect, ReasoningBudget

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

SWITCHES = ("enable_thinking", "thinking")  # of templates: true or false
LEVEL = "reasoning_effort"
WHERE_IT_BEGINS = 4  # tokens; a model may write a line break before it opens its reasoning
# Tokens of reasoning where the template knows no levels; those above have no bound.
BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096, "high": 16384}


def thinking(
    effort: Effort | None, dialect: Dialect, field: str
) -> tuple[dict[str, Any], ReasoningBudget | None]:
    """Arguments for the template, and how long the reasoning may be. RequestError where the model cannot
    think, or cannot be kept from it."""
    if effort is None:
        return {}, None
    switch = next((name for name in SWITCHES if name in dialect.reads), None)
    level = LEVEL in dialect.reads
    if effort == "none":
        if dialect.reasoning and not switch and not level:
            raise invalid(f"{field}: this model always thinks.", field, "unsupported_value")
        return ({switch: False} if switch else {LEVEL: effort} if level else {}), None
    if not (dialect.reasoning or switch or level):
        raise invalid(f"{field}: this model does not think.", field, "unsupported_value")
    args: dict[str, Any] = {switch: True} if switch else {}
    if level:
        return args | {LEVEL: effort}, None
    tokens = BUDGETS.get(effort)
    return args, None if tokens is None else ReasoningBudget(tokens, field)


def thought(ids: Sequence[int], dialect: Dialect, inside: bool) -> int:
    """How many of an answer's tokens are reasoning, its marks included; `inside`: the prompt has opened it."""
    if not dialect.reasoning_ids:
        return 0
    begin, end = dialect.reasoning_ids
    if not inside and _find(ids[: WHERE_IT_BEGINS + len(begin)], begin) < 0:
        return 0
    at = _find(ids, end)
    return len(ids) if at < 0 else at + len(end)


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` first stands in `ids`; -1: nowhere."""
    size = len(part)
    return next((i for i in range(len(ids) - size + 1) if list(ids[i : i + size]) == part), -1)


def unread(args: dict[str, Any], dialect: Dialect) -> list[str]:
    """Template arguments that the template does not look at."""
    return [f"chat_template_kwargs.{name}" for name in args if name not in dialect.reads]
