"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from pipeline.server.answer import Answer
from pipeline.server.asked import Asked, Bounds, asked, base_request
from pipeline.server.contract import ServedEngine
from pipeline.server.errors import invalid
from pipeline.server.logprobs import Logprobs, TextLogprobs
from pipeline.server.replies import Chunks
from pipeline.server.schema import Common, Prompt, read
from pipeline.server.voices import News, Voice
from pipeline.types import PromptLogprob, Request, Tokenizer, TokenLogprob


class TextBody(Common):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: int | None = None


class Completions:
    """The family of text completions."""

    def read(self, value: Mapping[str, Any], bounds: Bounds) -> Asked:
        body = read(TextBody, value)
        if body.best_of not in (None, body.n or 1):
            raise invalid("best_of: only what n is.", "best_of", "unsupported_parameter")
        scored = body.logprobs if body.echo else None
        if scored is not None and body.stream and (body.n or 1) > 1:
            message = "echo: with logprobs and stream only for n = 1."
            raise invalid(message, "echo", "unsupported_value")
        base = replace(
            base_request(body, f"cmpl-{uuid4().hex}", bounds),
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
        )
        if scored is not None and body.prompt_logprobs is None:
            base = replace(base, prompt_logprobs=scored)
        return asked(body, [_prompt(base, prompt, bounds) for prompt in body.prompt], bounds)

    async def writer(self, answer: Answer, engine: ServedEngine) -> TextWriter:
        echoes: list[Echo] = []
        if answer.asked.body.echo:  # type: ignore[attr-defined]
            firsts = answer.asked.requests[:: answer.asked.n]
            echoes = await answer.pools.wait(
                lambda: [Echo.of(one, engine.tokenizer) for one in firsts]
            )
        return TextWriter(answer, engine, echoes)


@dataclass(frozen=True)
class Echo:
    """A prompt as it is shown before its answers."""

    text: str
    ids: Sequence[int]  # its tokens; none where only its text is shown

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer) -> Echo:
        if request.text is None:
            ids = request.token_ids or ()
            return cls(tokenizer.decode(ids), ids)
        return cls(request.text, () if request.logprobs is None else tokenizer.encode(request.text))


def _prompt(base: Request, prompt: str | list[int], bounds: Bounds) -> Request:
    if isinstance(prompt, str):
        return replace(base, text=prompt)
    if not all(0 <= token < bounds.vocab_size for token in prompt):
        raise invalid(f"prompt: a token id is not in 0..{bounds.vocab_size - 1}.", "prompt")
    return replace(base, token_ids=tuple(prompt))


class TextWriter(Chunks):
    whole_name = chunk_name = "text_completion"

    def __init__(self, answer: Answer, engine: ServedEngine, echoes: Sequence[Echo]):
        """`echoes`: one a prompt, none if they are not to be shown."""
        super().__init__(answer, engine)
        self._echoes = echoes
        self._scored = bool(echoes) and answer.asked.requests[0].logprobs is not None

    def logprobs(self, top: int) -> Logprobs:
        return TextLogprobs(self.tokenizer, top)

    def opening(self) -> Iterable[bytes]:
        for index in range(len(self.voices)) if self._echoes and not self._scored else ():
            yield self.chunk(index, {"text": self._echo(index).text})

    def news(self, index: int, news: News) -> Iterable[bytes]:
        """A prompt that is to be scored is shown when it has been."""
        if news.prompt and self._scored:
            form = self._formats[index]
            assert isinstance(form, TextLogprobs)
            logprobs = form.take(self._entries(index, news.prompt), first=None)
            yield self.chunk(index, {"text": self._echo(index).text, "logprobs": logprobs})
        yield from super().news(index, news)

    def parts(self, index: int, news: News) -> list[dict[str, Any]]:
        text = "".join(getattr(piece, "text", "") for piece in news.pieces)
        return [{"text": text}] if text else []

    def parts_of_nothing(self) -> dict[str, Any]:
        return {"text": ""}

    def ending(self) -> dict[str, Any]:
        return {"text": ""}

    def whole_choice(self, index: int, voice: Voice) -> dict[str, Any]:
        if not self._echoes:
            return {"text": voice.content, **self.prompt_scores(index)}
        text = self._echo(index).text + voice.content
        scored = self.answer.asked.requests[index].logprobs is not None
        logprobs = {"logprobs": self._echoed(index, voice)} if scored else {}
        asked = self.answer.asked.body.prompt_logprobs is not None  # type: ignore[attr-defined]
        return {"text": text, **logprobs, **(self.prompt_scores(index) if asked else {})}

    def _echo(self, index: int) -> Echo:
        return self._echoes[index // self.answer.asked.n]

    def _echoed(self, index: int, voice: Voice) -> dict[str, Any]:
        """The prompt's tokens before the answer's."""
        prompt = self.voices[index - index % self.answer.asked.n].prompt
        form = TextLogprobs(self.tokenizer, self.answer.asked.requests[index].logprobs or 0)
        return form.take([*self._entries(index, prompt), *voice.entries], first=None)

    def _entries(self, index: int, prompt: Sequence[PromptLogprob | None]) -> list[TokenLogprob]:
        """Of a scored prompt; its first token follows nothing, so its number means nothing."""
        known = [TokenLogprob(e.token_id, e.logprob, e.top) for e in prompt if e]
        return [TokenLogprob(self._echo(index).ids[0], 0.0), *known]
