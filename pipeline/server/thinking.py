"""How much a model is to think, in the words of its chat template."""

from __future__ import annotations

from typing import Any, Literal

from pipeline.server.errors import invalid
from pipeline.types import Dialect

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

SWITCHES = ("enable_thinking", "thinking")  # of templates: true or false
LEVEL = "reasoning_effort"


def thinking(
    effort: Effort | None, dialect: Dialect, field: str
) -> tuple[dict[str, Any], list[str]]:
    """Arguments for the template, and what of the request has no effect. RequestError where the model
    cannot think, or cannot be kept from it."""
    if effort is None:
        return {}, []
    switch = next((name for name in SWITCHES if name in dialect.reads), None)
    level = LEVEL in dialect.reads
    if effort == "none":
        if dialect.reasoning and not switch and not level:
            raise invalid(f"{field}: this model always thinks.", field, "unsupported_value")
        return ({switch: False} if switch else {LEVEL: effort} if level else {}), []
    if not (dialect.reasoning or switch or level):
        raise invalid(f"{field}: this model does not think.", field, "unsupported_value")
    args: dict[str, Any] = {switch: True} if switch else {}
    return (args | {LEVEL: effort}, []) if level else (args, [f"{field}[level]"])


def unread(args: dict[str, Any], dialect: Dialect) -> list[str]:
    """Template arguments that the template does not look at."""
    return [f"chat_template_kwargs.{name}" for name in args if name not in dialect.reads]
