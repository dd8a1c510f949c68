"""What the clients ask, over all families. Each has one right answer: greedy, or with a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.lab import texts
from pipeline.lab.prompts import SCHEMA

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SHORT, LONG_SENTENCES = 12, 60  # tokens of an answer; sentences of a long prompt, some 1,200 tokens
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
LOOK_UP = {"type": "object", "properties": {"word": {"enum": ["weir", "wheel"]}},
           "required": ["word"], "additionalProperties": False}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One request, or two of which the second goes on from the first one's answer."""

    name: str
    path: str
    body: Mapping[str, Any]
    then: Mapping[str, Any] | None = None
    streams: bool = True
    long: bool = False  # its prompt takes long

    @property
    def data(self) -> bytes:
        return json.dumps(self.body).encode()


def questions() -> list[Question]:
    return [*_chats(), *_completions(), *_messages(), *_responses(), *_counts(), *_long()]


def _turn(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _words() -> list[str]:
    return texts.read("questions").splitlines()


def _chats() -> Iterator[Question]:
    known = _words()
    for index, text in enumerate(known[:4]):
        yield _chat(f"plain{index}", text)
    yield _chat("sampled", known[4], **SAMPLED)
    yield _chat("choices", known[5], n=2, **SAMPLED)
    yield _chat("logprobs", known[6], logprobs=True, top_logprobs=2)
    yield _chat("stop", known[7], stop=["e", "mill"])
    yield _chat("penalties", known[8], frequency_penalty=0.6, repetition_penalty=1.1)
    yield _chat("session", known[9], session_id="soak")
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
    yield _chat("form", known[10], response_format=form, max_tokens=80)
    function = {"name": "look_up", "parameters": LOOK_UP}
    tools = [{"type": "function", "function": function}]
    yield _chat("tool", known[11], tools=tools, tool_choice="required", max_tokens=80)


def _chat(name: str, text: str, **more: Any) -> Question:
    body = {"messages": _turn(text), "max_tokens": SHORT, "temperature": 0.0, **more}
    return Question(f"chat {name}", CHAT, body)


def _completions() -> Iterator[Question]:
    first, second = texts.read("continue").splitlines()[:2]
    common = {"max_tokens": SHORT, "temperature": 0.0}
    yield Question("text plain", TEXT, {"prompt": first, **common})
    yield Question("text list", TEXT, {"prompt": [first, second], **common})
    yield Question("text ids", TEXT, {"prompt": [65, 66, 67, 68], **common})
    yield Question("text echo", TEXT, {"prompt": second, "echo": True, **common})
    scored = {"prompt": first, "echo": True, "logprobs": 1, **common}
    yield Question("text scored", TEXT, scored, streams=False)


def _messages() -> Iterator[Question]:
    known = _words()
    common = {"max_tokens": SHORT, "temperature": 0.0}
    yield Question("message plain", MESSAGES, {"messages": _turn(known[12]), **common})
    said = {"system": "Be brief.", "messages": _turn(known[13]), "stop_sequences": ["the"]}
    yield Question("message stop", MESSAGES, {**said, **common})
    tool = {"name": "look_up", "input_schema": LOOK_UP}
    use = {"messages": _turn(known[14]), "tools": [tool], "tool_choice": {"type": "any"}}
    yield Question("message tool", MESSAGES, {**common, **use, "max_tokens": 80})


def _responses() -> Iterator[Question]:
    known = _words()
    common = {"max_output_tokens": SHORT, "temperature": 0.0}
    yield Question("response plain", RESPONSES, {"input": known[15], "store": False, **common})
    yield Question(
        "response chain", RESPONSES, {"input": known[16], **common}, {"input": known[17], **common}
    )


def _counts() -> Iterator[Question]:
    yield Question("tokens", "/tokenize", {"prompt": _words()[18]}, streams=False)
    counted = {"messages": _turn(_words()[19])}
    yield Question("count", "/v1/messages/count_tokens", counted, streams=False)


def _long() -> Iterator[Question]:
    for index in range(3):
        prose = texts.prose(9000 + index, LONG_SENTENCES)
        body = {"messages": _turn(prose), "max_tokens": 4, "temperature": 0.0}
        yield Question(f"long {index}", CHAT, body, long=True)
