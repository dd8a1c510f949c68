"""What clients of /v1/responses send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pipeline.server.schema import Adapter, Body, Ceiling, Many, StreamOptions
from pipeline.server.thinking import Effort
from pipeline.server.tools import Choice, Name

MAX_METADATA = 16  # pairs, as OpenAI has it


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutput(Body):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | list[Any]
    id: str | None = None
    status: str | None = None


class ReasoningPart(Body):
    type: str
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[Any] = []
    content: Many[ReasoningPart] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: str | None = None


ITEMS: dict[str, type[Body]] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionOutput,
    "reasoning": ReasoningItem,
}


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: Name

    def named(self) -> Choice:
        return Choice("must", (self.name,), many=False)


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Many[ChosenTool], Field(min_length=1)]

    def named(self) -> Choice:
        names = tuple(tool.name for tool in self.tools)
        return Choice("must" if self.mode == "required" else "auto", names)


class TextFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    # `schema` is a method of pydantic's models
    form: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextConfig(Body):
    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Body):
    effort: Effort | None = None
    summary: str | None = None  # all of the reasoning is given out: nothing is summed up
    generate_summary: str | None = None


def _few(pairs: Any) -> Any:
    if isinstance(pairs, dict) and len(pairs) > MAX_METADATA:
        raise ValueError(f"has more than {MAX_METADATA} pairs")
    return pairs


class ResponsesBody(Body):
    model: str | None = None
    input: str | Annotated[Many[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Ceiling | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Many[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        None
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    user: str | None = None
    truncation: Literal["disabled"] | None = None
    # ours
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    session_id: str | None = None
    adapter: Adapter = None
    priority: Annotated[int, Field(ge=-8, le=8)] | None = None
