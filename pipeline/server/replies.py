"""What chat and text completions write alike: heads, chunks, usage. Whole and streamed objects come from
the same books."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.server.answer import Answer
from pipeline.server.asked import include_usage
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import Fault
from pipeline.server.logprobs import Logprobs, prompt_form
from pipeline.server.token_origins import TokenOrigins
from pipeline.server.voices import News, Voice, voices
from pipeline.server.writer import frame
from pipeline.types import Done, TokenLogprob


class Chunks:
    """A `Writer` but for what an endpoint's own words are: a subclass says those."""

    whole_name: str
    chunk_name: str

    def __init__(self, answer: Answer, engine: ServedEngine):
        self.answer, self.engine = answer, engine
        self.voices: Sequence[Voice] = voices(answer, engine)
        self.tokenizer = engine.tokenizer
        self._created = int(time.time())
        self._usage_wanted = include_usage(answer.asked)
        self._formats = [
            None if r.logprobs is None else self.logprobs(r.logprobs) for r in answer.asked.requests
        ]
        self._origins = {
            i: TokenOrigins(self.tokenizer, marks=r.marks)
            for i, r in enumerate(answer.asked.requests)
            if r.origins
        }

    # --- an endpoint's own words

    def logprobs(self, top: int) -> Logprobs:
        raise NotImplementedError

    def parts(self, index: int, news: News) -> list[dict[str, Any]]:
        """The parts of a choice that show these pieces, one a chunk."""
        raise NotImplementedError

    def ending(self) -> dict[str, Any]:
        raise NotImplementedError

    def whole_choice(self, index: int, voice: Voice) -> dict[str, Any]:
        raise NotImplementedError

    # --- frames

    def opening(self) -> Iterable[bytes]:
        return ()

    def news(self, index: int, news: News) -> Iterable[bytes]:
        """Log-probabilities and origins go out with the first chunk of their burst."""
        first = self._of_tokens(index, news)
        parts = self.parts(index, news)
        if not parts and first:
            parts = [self.parts_of_nothing()]
        for part in parts:
            yield self.chunk(index, part | first)
            first = {}

    def _of_tokens(self, index: int, news: News) -> dict[str, Any]:
        """What a chunk says of its burst's tokens beside their text."""
        found: dict[str, Any] = {}
        if news.entries and self._formats[index]:
            found["logprobs"] = self.formatted(index, news.entries)
        if news.told:
            found["headrace"] = {"tokens": self._origins[index].take(news.told)}
        return found

    def parts_of_nothing(self) -> dict[str, Any]:
        """A chunk that has no text."""
        raise NotImplementedError

    def ended(self, index: int, done: Done) -> Iterable[bytes]:
        reason = self.voices[index].finish_reason
        ending = {"logprobs": None, "finish_reason": reason, "headrace": extra(done)}
        yield self._framed([{"index": index, **self.ending(), **ending}])

    async def closing(self) -> Iterable[bytes]:
        usage = {**self._chunk([]), "usage": self.usage()}
        return [*([frame(usage)] if self._usage_wanted else []), b"data: [DONE]\n\n"]

    def failed(self, fault: Fault) -> Iterable[bytes]:
        yield frame(fault.body())

    def chunk(self, index: int, part: dict[str, Any]) -> bytes:
        logprobs = part.get("logprobs")
        return self._framed([{"index": index, **part, "logprobs": logprobs, "finish_reason": None}])

    # --- objects

    async def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(i, voice) for i, voice in enumerate(self.voices)]
        return {**self._head(self.whole_name), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        used = self.answer.usage
        usage = {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
            "resumed_tokens": used.resumed_tokens,
        }
        if thought := sum(voice.reasoning_tokens for voice in self.voices):
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    def prompt_scores(self, index: int) -> dict[str, Any]:
        """vLLM's field where it was asked for: the choice's prompt, scored with its first choice."""
        done = self.voices[index - index % self.answer.asked.n].done
        form = prompt_form(self.tokenizer, done.prompt_logprobs) if done else None
        return {} if form is None else {"prompt_logprobs": form}

    def formatted(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        form = self._formats[index]
        return form.take(entries) if form else None

    def _whole_choice(self, index: int, voice: Voice) -> dict[str, Any]:
        assert voice.done is not None, "a reply is written when every choice has ended"
        part = {"logprobs": self.formatted(index, voice.entries)}
        part |= self.whole_choice(index, voice)
        told = extra(voice.done)
        if index in self._origins:
            told["tokens"] = self._origins[index].take(voice.told)
        ending = {"finish_reason": voice.finish_reason, "headrace": told}
        return {"index": index, **part, **ending}

    def _head(self, name: str) -> dict[str, Any]:
        head = {"id": self.answer.asked.id, "object": name, "created": self._created}
        return {**head, "model": self.engine.target_info["name"]}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_name), "choices": choices}
        return {**chunk, "usage": None} if self._usage_wanted else chunk

    def _framed(self, choices: list[dict[str, Any]]) -> bytes:
        return frame(self._chunk(choices))


def extra(done: Done) -> dict[str, Any]:
    """Ours, beside OpenAI's fields: the seed that repeats it, seconds by stage, drafting."""
    speculation = asdict(done.speculation)
    return {"seed": done.seed, "timings": dict(done.timings), "speculation": speculation}
