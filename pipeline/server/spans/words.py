"""An answer's books in the words of the GenAI semantic conventions; what those have no word for is
under `headrace.`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.server.answer import Answer
from pipeline.server.asked import Asked
from pipeline.server.voices import Voice
from pipeline.types import Request

MOST = 256  # letters of a name that a client chose
SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


def asked_for(asked: Asked, model: str) -> dict[str, Any]:
    """What the request said; what it left open is not there."""
    first = asked.requests[0]
    said = {name: getattr(first.sampling, name) for name in SAMPLING}
    said |= {"max_tokens": first.max_tokens, "stop_sequences": list(first.stop) or None}
    said |= {"model": (getattr(asked.body, "model", None) or model)[:MOST]}
    said |= {"choice.count": asked.n if asked.n > 1 else None, "stream": asked.stream or None}
    found = {f"gen_ai.request.{name}": value for name, value in said.items() if value is not None}
    if first.session_id:
        found["gen_ai.conversation.id"] = first.session_id[:MOST]
    if first.grammar:
        found["gen_ai.output.type"] = "json" if first.grammar.kind == "json_schema" else "text"
    return found


def outcome(answer: Answer, voices: Sequence[Voice]) -> dict[str, Any]:
    """What it cost and how it ended, also of one that was cut."""
    usage = answer.usage
    done = [choice.done for choice in answer.choices if choice.done]
    drafted = sum(one.speculation.drafted for one in done)
    accepted = sum(one.speculation.accepted for one in done)
    found: dict[str, Any] = {
        "gen_ai.response.id": answer.asked.id,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.finish_reasons": [
            voice.finish_reason if voice.done else answer.outcome for voice in voices
        ]
        or [answer.outcome],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "headrace.usage.resumed_tokens": usage.resumed_tokens,
        "headrace.speculation.drafted_tokens": drafted,
        "headrace.speculation.accepted_tokens": accepted,
        "headrace.outcome": answer.outcome,
    }
    if thought := sum(voice.reasoning_tokens for voice in voices):
        found["gen_ai.usage.reasoning.output_tokens"] = thought
    if drafted:
        found["headrace.speculation.acceptance"] = accepted / drafted
    if spoke := [choice.first for choice in answer.choices if choice.first]:
        found["gen_ai.response.time_to_first_chunk"] = min(spoke) - answer.began
    return found


def contents(answer: Answer, voices: Sequence[Voice]) -> dict[str, str]:
    """Prompts and answers as JSON; a prompt of token ids has no text."""
    prompts = answer.asked.requests[:: answer.asked.n]
    heard = [message for request in prompts for message in _messages(request)]
    found = {"input": list(map(_message, heard)), "output": list(map(_spoken, voices))}
    return {f"gen_ai.{name}.messages": json.dumps(said) for name, said in found.items() if said}


def _messages(request: Request) -> Sequence[Mapping[str, Any]]:
    text = {"role": "user", "content": request.text}
    return request.messages or ([text] if request.text is not None else [])


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content)
    return {"role": message.get("role", ""), "parts": _parts("text", text)}


def _spoken(voice: Voice) -> dict[str, Any]:
    calls = [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
        for call in voice.calls
    ]
    parts = [*_parts("reasoning", voice.reasoning), *_parts("text", voice.content), *calls]
    reason = voice.finish_reason if voice.done else "error"
    return {"role": "assistant", "parts": parts, "finish_reason": reason}


def _parts(kind: str, text: str) -> list[dict[str, Any]]:
    return [{"type": kind, "content": text}] if text else []
