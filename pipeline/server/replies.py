"""The objects a client reads, whole or in pieces. Both come from the same books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeline.server.answer import Answer
from pipeline.server.contract import ServedEngine
from pipeline.server.logprobs import Logprobs, prompt_form
from pipeline.server.shapes import Shape
from pipeline.types import Delta, Done


class Scribe:
    """Writes one answer's objects in its endpoint's shape."""

    def __init__(self, shape: Shape, answer: Answer, engine: ServedEngine):
        self.shape, self._answer = shape, answer
        self._created = int(time.time())
        self._model = engine.target_info["name"]
        self._tokenizer = engine.tokenizer
        self._formats = [_format(shape, engine, r.logprobs) for r in answer.asked.requests]

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The complete object; `deltas[i]` are all of choice i."""
        choices = [self._whole_choice(i, pieces) for i, pieces in enumerate(deltas)]
        body = {**self._head(self.shape.whole_name), "choices": choices, "usage": self.usage()}
        return {**body, **(self._prompt(0) if self.shape.one_prompt else {})}

    def _prompt(self, index: int) -> dict[str, Any]:
        """vLLM's field where it was asked for: the choice's prompt, scored with its first choice."""
        done = self._answer.choices[index - index % self._answer.asked.n].done
        form = prompt_form(self._tokenizer, done.prompt_logprobs) if done else None
        return {} if form is None else {"prompt_logprobs": form}

    def chunk(self, index: int, part: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": None}
        return self._chunk([choice])

    def piece(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """One chunk for all that waited; None if it shows nothing (text held back for a stop)."""
        text, logprobs = self._joined(index, deltas)
        if not text and logprobs is None:
            return None
        return self.chunk(index, self.shape.delta(text), logprobs)

    def end(self, index: int, done: Done) -> dict[str, Any]:
        """The choice's one terminal chunk."""
        ending = {"logprobs": None, "finish_reason": done.finish_reason, "headrace": _extra(done)}
        return self._chunk([{"index": index, **self.shape.ending(), **ending}])

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Prompts are counted once, however many choices each has."""
        usages = [choice.done.usage for choice in self._answer.choices if choice.done]
        firsts = usages[:: self._answer.asked.n]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in firsts)},
            "resumed_tokens": sum(usage.resumed_tokens for usage in usages),
        }

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        text, logprobs = self._joined(index, deltas, always=True)
        done = self._answer.choices[index].done
        assert done is not None, "a reply is written when every choice has ended"
        ending = {"finish_reason": done.finish_reason, "headrace": _extra(done)}
        if not self.shape.one_prompt:
            ending |= self._prompt(index)
        return {"index": index, **self.shape.whole(text), "logprobs": logprobs, **ending}

    def _joined(
        self, index: int, deltas: Sequence[Delta], *, always: bool = False
    ) -> tuple[str, dict[str, Any] | None]:
        text = "".join(delta.text for delta in deltas)
        entries = [entry for delta in deltas for entry in delta.logprobs]
        form = self._formats[index]
        return text, form.take(entries) if form and (entries or always) else None

    def _head(self, name: str) -> dict[str, Any]:
        head = {"id": self._answer.asked.id, "object": name, "created": self._created}
        return {**head, "model": self._model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self.shape.chunk_name), "choices": choices}
        return {**chunk, "usage": None} if self._answer.asked.include_usage else chunk


def _format(shape: Shape, engine: ServedEngine, top: int | None) -> Logprobs | None:
    if top is None:
        return None
    return shape.logprobs(engine.tokenizer, engine.target_info["eos_ids"], top)


def _extra(done: Done) -> dict[str, Any]:
    """Ours, beside OpenAI's fields: the seed that repeats it, seconds by stage, drafting."""
    speculation = asdict(done.speculation)
    return {"seed": done.seed, "timings": dict(done.timings), "speculation": speculation}
