"""The choices of one answer while they speak: pieces for streams, and all that was said for the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby
from typing import Any

from pipeline.errors import ClosedError
from pipeline.server.answer import Answer
from pipeline.server.contract import ServedEngine
from pipeline.server.conversation import CalledFunction, Plain, call_for_template
from pipeline.server.pools import Pools
from pipeline.server.speech import (
    CallBegins,
    CallText,
    CallWords,
    Content,
    Heard,
    Piece,
    Reasoning,
    Speech,
)
from pipeline.server.thinking import thought
from pipeline.server.token_origins import Told
from pipeline.types import Delta, Dialect, Done, PromptLogprob, Request, TokenLogprob


@dataclass(frozen=True)
class Call:
    """A tool call as far as it is known."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True)
class News:
    """What a burst of tokens adds. Log-probabilities and origins come with their tokens, though a
    token's text may still be held back."""

    pieces: list[Piece]
    entries: Sequence[TokenLogprob] = ()
    told: Sequence[Told] = ()
    prompt: Sequence[PromptLogprob | None] = ()  # once, where it was to be scored


@dataclass
class Voice:
    """One choice. What is said is read beside the event loop where it takes the engine, which may be slow to
    answer, or gone."""

    speech: Speech
    dialect: Dialect
    inside: bool  # its prompt has opened its reasoning
    tools: Sequence[Mapping[str, Any]]  # that it may call
    name_call: Callable[[int], str]  # gives the n-th call its id
    pools: Pools
    pieces: list[Piece] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    begun: int = 0  # calls
    prompt: Sequence[PromptLogprob | None] = ()
    done: Done | None = None

    async def hear(self, deltas: Iterable[Delta]) -> News:
        deltas = list(deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        self.entries += entries
        told = [pair for d in deltas for pair in zip(d.token_ids, d.origins, strict=False)]
        self.told += told
        self.ids += [token for delta in deltas for token in delta.token_ids]
        pieces = await self._read(self.speech.push("".join(delta.text for delta in deltas)))
        prompt = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ())
        return News(pieces, entries, told, self._scored(prompt))

    async def end(self, done: Done) -> News:
        pieces = await self._read(self.speech.flush())
        self.done = done
        return News(pieces, prompt=self._scored(done.prompt_logprobs))

    def _scored(self, prompt: Sequence[PromptLogprob | None]) -> Sequence[PromptLogprob | None]:
        """What is new of it."""
        if self.prompt:
            return ()
        self.prompt = prompt
        return prompt

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Content))

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Reasoning))

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.said if isinstance(part, Call)]

    @property
    def said(self) -> list[Content | Reasoning | Call]:
        """All of it in order, whole."""
        parts: list[Content | Reasoning | Call] = []
        for kind, group in groupby(self.pieces, key=type):
            pieces = list(group)
            text = "".join(piece.text for piece in pieces if not isinstance(piece, CallBegins))
            if kind is CallText:
                parts[-1] = Call(parts[-1].id, parts[-1].name, text)  # type: ignore[union-attr]
            elif kind is CallBegins:
                parts += [Call(p.id, p.name) for p in pieces if isinstance(p, CallBegins)]
            else:
                parts.append(Content(text) if kind is Content else Reasoning(text))
        return parts

    @property
    def turn(self) -> Plain:
        """The answer as the next request's chat has it."""
        calls = [
            call_for_template(call.id, CalledFunction(name=call.name, arguments=call.arguments))
            for call in self.calls
        ]
        more = {"reasoning_content": self.reasoning, "tool_calls": calls}
        turn = {"role": "assistant", "content": self.content}
        return turn | {name: value for name, value in more.items() if value}

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended."""
        assert self.done is not None
        stopped = self.done.finish_reason == "stop"
        return "tool_calls" if stopped and self.begun else self.done.finish_reason

    @property
    def reasoning_tokens(self) -> int:
        return thought(self.ids, self.dialect, self.inside) if self.reasoning else 0

    async def _read(self, heard: Iterable[Heard]) -> list[Piece]:
        """Calls read, named and remembered."""
        pieces: list[Piece] = []
        for one in heard:
            for piece in await self._called(one) if isinstance(one, CallWords) else [one]:
                pieces.append(self._named(piece) if isinstance(piece, CallBegins) else piece)
        self.pieces += pieces
        return pieces

    async def _called(self, words: CallWords) -> list[Piece]:
        """What is no call after all is content."""
        try:
            calls = await self.pools.wait(self.dialect.calls, words.text, self.tools)
        except ClosedError:  # nobody has read it
            raise
        except ValueError:
            return [Content(words.marked)]
        pairs = ((CallBegins(call.id or "", call.name), CallText(call.arguments)) for call in calls)
        return [piece for pair in pairs for piece in pair]

    def _named(self, call: CallBegins) -> CallBegins:
        self.begun += 1
        return call if call.id else replace(call, id=self.name_call(self.begun - 1))


def voices(answer: Answer, engine: ServedEngine, prefix: str = "call_") -> list[Voice]:
    """One a choice, once all are admitted. `prefix` begins the ids of calls, as the family writes them."""
    dialect, tools = engine.tokenizer.dialect, answer.asked.tools

    def voice(request: Request, inside: bool) -> Voice:
        def name_call(index: int) -> str:
            return call_id(prefix, request.id, index, short=dialect.short_ids)

        spoken = dialect if request.marks else None
        speech = Speech(spoken, inside=inside, calls=tools is not None)
        allowed = tools.allowed if tools else ()
        return Voice(speech, dialect, inside, allowed, name_call, answer.pools)

    pairs = zip(answer.asked.requests, answer.choices, strict=True)
    return [voice(request, choice.thinking) for request, choice in pairs]


def call_id(prefix: str, request_id: str, index: int, *, short: bool) -> str:
    """The same for the same call, whole or streamed; no other call has it."""
    word = sha256(f"{request_id}/{index}".encode()).hexdigest()
    return word[:9] if short else prefix + word[:24]
