"""What an answer says, the same whether it came whole or in pieces."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.lab.soak.questions import CHAT, MESSAGES, RESPONSES, TEXT

Said = list[Any]  # JSON; two answers are the same if these are equal


class Broken(Exception):
    """The answer ended in a way that no answer may."""


def whole(path: str, answer: Mapping[str, Any]) -> Said:
    """Of an object."""
    match path:
        case "/v1/chat/completions":
            return [_chosen(c["message"], c["finish_reason"]) for c in answer["choices"]]
        case "/v1/completions":
            return [[c["text"], c["finish_reason"]] for c in answer["choices"]]
        case "/v1/messages":
            blocks = [_block(block) for block in answer["content"]]
            return [blocks, answer["stop_reason"], answer["usage"]["output_tokens"]]
        case "/v1/responses":
            return [[_item(item) for item in answer["output"]], answer["status"]]
    return [answer]


def streamed(path: str, events: Iterable[Mapping[str, Any]]) -> Said:
    """Of a stream's events, `[DONE]` among them as {}. Broken if its last event is missing."""
    events = list(events)
    if any("error" in event or event.get("type") == "error" for event in events):
        raise Broken(f"an error in mid-stream: {events[-1]}"[:300])
    readers = {CHAT: _chat, TEXT: _text, MESSAGES: _message, RESPONSES: _response}
    if not events or not _ended(path, events[-1]):
        raise Broken(f"the stream broke off after {len(events)} events")
    return readers[path](events)


def _ended(path: str, last: Mapping[str, Any]) -> bool:
    if path == MESSAGES:
        return last.get("type") == "message_stop"
    if path == RESPONSES:
        return last.get("type") in ("response.completed", "response.incomplete")
    return last == {}


def _chosen(message: Mapping[str, Any], reason: str) -> Said:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    named = [[call["name"], call["arguments"]] for call in calls]
    return [message.get("content") or "", message.get("reasoning_content") or "", named, reason]


def _chat(events: Iterable[Mapping[str, Any]]) -> Said:
    found: dict[int, dict[str, Any]] = defaultdict(lambda: {"tool_calls": []})
    reasons: dict[int, str] = {}
    for choice in _choices(events):
        at = choice["index"]
        _grow(found[at], choice["delta"])
        reasons[at] = choice["finish_reason"] or reasons.get(at, "")
    return [_chosen(found[at], reasons[at]) for at in sorted(found)]


def _grow(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        message[name] = message.get(name, "") + (delta.get(name) or "")
    for call in delta.get("tool_calls") or ():
        if call["index"] == len(message["tool_calls"]):
            message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
        function = message["tool_calls"][call["index"]]["function"]
        for name, text in call["function"].items():
            function[name] += text


def _text(events: Iterable[Mapping[str, Any]]) -> Said:
    found: dict[int, list[str]] = defaultdict(lambda: ["", ""])
    for choice in _choices(events):
        text, reason = found[choice["index"]]
        found[choice["index"]] = [text + choice["text"], choice["finish_reason"] or reason]
    return [found[at] for at in sorted(found)]


def _choices(events: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    for event in events:
        yield from event.get("choices", ())


def _message(events: Iterable[Mapping[str, Any]]) -> Said:
    blocks: list[list[str]] = []
    end: Mapping[str, Any] = {}
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks.append([block["type"], block.get("name", ""), ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1][2] += next(
                delta[n] for n in ("text", "thinking", "partial_json") if n in delta
            )
        elif event["type"] == "message_delta":
            end = event
    return [
        [_plain(*block) for block in blocks],
        end["delta"]["stop_reason"],
        end["usage"]["output_tokens"],
    ]


def _block(block: Mapping[str, Any]) -> Said:
    said = next(block[name] for name in ("input", "thinking", "text") if name in block)
    return [block["type"], block.get("name", ""), said or ""]


def _plain(kind: str, name: str, text: str) -> Said:
    return [kind, name, json.loads(text) if kind == "tool_use" and text else text]


def _response(events: list[Mapping[str, Any]]) -> Said:
    """The last event has the whole; what was shown before must be the same."""
    said = whole(RESPONSES, events[-1]["response"])
    shown = "".join(e["delta"] for e in events if e["type"].endswith("output_text.delta"))
    told = "".join(text for kind, text in said[0] if kind == "message")
    if shown != told:
        raise Broken(f"shown {shown!r}, told {told!r}")
    return said


def _item(item: Mapping[str, Any]) -> Said:
    if item["type"] == "function_call":
        return ["function_call", [item["name"], item["arguments"]]]
    return [item["type"], "".join(part["text"] for part in item["content"])]
