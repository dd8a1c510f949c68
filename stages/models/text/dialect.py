"""How a model's family marks reasoning and tool calls, read from its chat template and vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from pipeline.types import ToolCall
from stages.models.text.calls import JSON_TOOLS, CallFormat, infer
from stages.models.text.chat_template import ChatTemplate
from stages.models.text.forced import call_grammar

# Source: `_infer_thinking` of mlx_lm.tokenizer_utils
REASONING = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)


class Spelling(Protocol):
    """What is asked of a tokenizer."""

    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class TemplateDialect:
    """A `Dialect`. Without a template that takes tools, or where nothing is known of how its family
    writes calls, `native` is false and the template's owner asks for calls as `tool_prompt` does."""

    def __init__(self, spelling: Spelling, chat: ChatTemplate | None, parser: str | None = None):
        self._spelling = spelling
        source = chat.source if chat else ""
        self.reads = chat.variables if chat else frozenset[str]()
        known = parser or infer(source, self._is_token)
        self.native = known is not None and "tools" in self.reads
        self._format = CallFormat.of(known if known and self.native else JSON_TOOLS)
        self.tools = (self._format.begin, self._format.end)
        self.reasoning: tuple[str, str] | None = next(
            (pair for pair in REASONING if self._marks(pair, source)), None
        )
        self.short_ids = self._format.name == "mistral"
        self.reasoning_ids: Sequence[list[int]] = (
            tuple(map(self._ids, self.reasoning)) if self.reasoning else ()
        )
        marks = (*self.tools, *(self.reasoning or ()), *self._format.inner)
        spelled = {i for mark in marks for i in self._ids(mark)}
        self.shown = frozenset(spelled & spelling.special_ids)

    def calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
        return self._format.read(text, tools)

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        must: bool,
        many: bool,
        answer: str | None,
    ) -> str:
        form = None if answer is None else json.loads(answer)
        if answer is not None and not isinstance(form, dict):
            raise ValueError("beside tools the schema must be an object")
        wanted = {"must": must, "many": many, "answer": form}
        return call_grammar(*self.tools, self._term, tools, wanted)

    def opened(self, header_ids: Sequence[int]) -> bool:
        """Whether these last ids of a prompt leave a reasoning section open."""
        if self.reasoning is None:
            return False
        text = b"".join(map(self._spelling.token_bytes, header_ids))
        begin, end = (text.rfind(mark.encode()) for mark in self.reasoning)
        return begin > end

    def _marks(self, pair: tuple[str, str], source: str) -> bool:
        pieces = [piece for mark in pair for piece in re.findall("<[^<>]+>", mark)]
        return all(map(self._is_token, pieces)) or all(mark in source for mark in pair)

    def _ids(self, mark: str) -> list[int]:
        return self._spelling.encode(mark, add_special=False) if mark else []

    def _is_token(self, text: str) -> bool:
        return len(self._ids(text)) == 1

    def _term(self, mark: str) -> str:
        """Lark: special tokens by their ids, all other text as it is."""
        special, ids = self._spelling.special_ids, self._ids(mark)
        if not special & set(ids):
            return json.dumps(mark, ensure_ascii=False)
        terms = []
        for is_special, group in groupby(ids, key=lambda i: i in special):
            if is_special:
                terms += [f"<[{i}]>" for i in group]
            else:
                data = b"".join(map(self._spelling.token_bytes, group))
                terms.append(json.dumps(data.decode(), ensure_ascii=False))
        return " ".join(terms)
