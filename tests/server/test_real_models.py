"""Real language models end to end over HTTP: together each client gets what it gets alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest

import pipeline
from pipeline.engine import Engine
from pipeline.server.run import serve_in_thread
from pipeline.server.settings import ServerSettings

pytestmark = pytest.mark.real
QUESTIONS = (
    "Name three rivers of Europe.",
    "Count from one to twenty in words: one, two,",
    "Say hello in French, German and Spanish.",
    "What is the capital of Japan? Answer in one long sentence.",
)


@dataclass
class Model:
    """A served model: chats where it has a template (SmolLM2), else completions (Gemma 3 270M)."""

    engine: Engine
    client: openai.OpenAI

    def ask(self, text: str, **more: Any) -> Any:
        said = {"model": "m", "temperature": 0, "max_tokens": 16, **more}
        if not self.engine.target_info["template"]:
            return self.client.completions.create(prompt=text, **said)
        messages: Any = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(messages=messages, **said)

    def stream(self, text: str, **more: Any) -> str:
        return "".join(map(piece, self.ask(text, stream=True, **more)))

    def leave(self, text: str) -> None:
        with self.ask(text, stream=True, max_tokens=None) as chunks:
            for _ in range(3):
                next(chunks)


def piece(chunk: Any) -> str:
    (choice,) = chunk.choices
    return (choice.text if hasattr(choice, "text") else choice.delta.content) or ""


@pytest.fixture(scope="module", params=["smollm2", "gemma3_270m"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with (
        pipeline.load(request.param) as engine,
        serve_in_thread(engine, ServerSettings()) as base,
        openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield Model(engine, client)


def test_four_together_and_one_that_leaves(model, script):
    alone = [model.stream(question) for question in QUESTIONS]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(5) as pool:
        leaving = pool.submit(model.leave, QUESTIONS[1] + " Then backwards.")
        assert list(pool.map(model.stream, QUESTIONS)) == alone
        leaving.result()
    script.eventually(lambda: model.engine.stats()["rows"]["open_requests"] == 0, timeout_s=10)


def test_a_longer_prompt_reuses_the_shorter(model):
    text = QUESTIONS[0] + " " + QUESTIONS[3]
    first = model.ask(text, max_tokens=8)
    again = model.ask(text + " " + QUESTIONS[2], max_tokens=4)
    assert again.usage.prompt_tokens > first.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= 10
    assert again.usage.completion_tokens <= 4


def test_stop_and_logprobs(model):
    whole = model.stream(QUESTIONS[1])
    stop = whole[5:9]
    assert model.stream(QUESTIONS[1], stop=[stop]) == whole[: whole.index(stop)]
    if not model.engine.target_info["template"]:
        form = model.ask(QUESTIONS[1], logprobs=1).choices[0].logprobs
        assert "".join(form.tokens) == whole
    else:
        entries = model.ask(QUESTIONS[1], logprobs=True).choices[0].logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole


SCHEMA = {
    "type": "object",
    "properties": {
        "capital_of_the_country": {"type": "string", "maxLength": 12},
        "is_it_on_the_river_seine": {"type": "boolean"},
    },
    "required": ["capital_of_the_country", "is_it_on_the_river_seine"],
    "additionalProperties": False,
}


def test_json_of_a_schema_with_and_without_drafts(script):
    """Same answer in fewer target passes than tokens where the schema's text is drafted; asked again,
    what was answered before is drafted too."""
    fields = {"json": SCHEMA, "disable_any_whitespace": True}
    asked = {"max_tokens": 80, "extra_body": {"structured_outputs": fields}}
    answers = []
    for recipe, times in ((("structured", "drafter=none"), 1), (("extract",), 2)):
        with (
            pipeline.load(*recipe, "tier=none") as engine,
            serve_in_thread(engine, ServerSettings()) as base,
            openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client,
        ):
            model = Model(engine, client)
            answers += [model.ask("Describe Paris as JSON.", **asked) for _ in range(times)]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts == [texts[0]] * 3
    assert set(json.loads(texts[0])) == set(SCHEMA["properties"])
    plain, drafted, again = (
        answer.choices[0].model_extra["headrace"]["speculation"]["target_calls"]
        for answer in answers
    )
    assert again < drafted < 0.8 * plain
    assert drafted < answers[1].usage.completion_tokens
