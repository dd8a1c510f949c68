"""What clients of /v1/messages send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.server.schema import Adapter, Body, Ceiling, Count, Many
from pipeline.server.tools import Name

Stops = Annotated[Many[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)]


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ToolUse(Body):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | Many[TextBlock] | None = None
    is_error: bool | None = None


class Thinking(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinking(Body):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ToolUse | ToolResult | Thinking | RedactedThinking, Field(discriminator="type")
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Many[Block], Field(min_length=1)]


class CustomTool(Body):
    """A tool of the client's; Anthropic's own, which run at Anthropic's, have other types."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    # `schema` is a method of pydantic's models
    form: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class Thread(Body):
    """A conversation that the server holds, under the ids of its answers."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountBody(Body):
    """What `count_tokens` takes, and a message's request too."""

    model: str | None = None
    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Many[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    max_tokens: Ceiling
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    metadata: Metadata | None = None
    thread: Thread | None = None
    # ours
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    session_id: str | None = None
    adapter: Adapter = None
    priority: Annotated[int, Field(ge=-8, le=8)] | None = None
