"""Prompts whose answers are part of a lock, and the same prompts asked again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.engine import Engine
from pipeline.errors import RequestError
from pipeline.lab import texts

ASKED: tuple[dict[str, Any], ...] = (
    {
        "name": "greedy",
        "prompt": "Name three rivers, and say of each in one sentence where it ends.",
        "wanted": {"max_tokens": 48, "temperature": 0.0},
    },
    {
        "name": "drawn",
        "prompt": "Tell the beginning of a story about a mill and its keeper.",
        "wanted": {"max_tokens": 48, "temperature": 0.8, "top_p": 0.95, "seed": 7},
    },
    {
        "name": "long",
        "prompt": "{survey}\n\nSay in one sentence what this text is about.",
        "wanted": {"max_tokens": 24, "temperature": 0.0},
    },
    {
        "name": "form",
        "prompt": "Describe a river as JSON.",
        "wanted": {
            "max_tokens": 48,
            "temperature": 0.6,
            "seed": 3,
            "grammar": {"regex": r'\{"river": "[A-Z][a-z]{2,9}", "kilometres": [1-9][0-9]{1,3}\}'},
        },
    },
)
LONG = 1200  # letters of the long prompt


def suited(engine: Engine) -> list[dict[str, Any]]:
    """The probes that this pipeline can answer."""
    forms = engine.pipeline.parts["constraint"].can
    return [probe for probe in ASKED if "grammar" not in probe["wanted"] or forms]


def answered(engine: Engine) -> list[dict[str, Any]]:
    """Each probe with its prompt spelled out, the ids it gave, and their log-probabilities."""
    survey = texts.read("survey")[:LONG]
    spelled = [{**p, "prompt": p["prompt"].format(survey=survey)} for p in suited(engine)]
    return [found for probe in spelled if (found := _answered(engine, probe))]


def _answered(engine: Engine, probe: Mapping[str, Any]) -> dict[str, Any] | None:
    """None where the prompt is too long for the context or for `limits`."""
    try:
        result = ask(engine, probe)
    except RequestError:
        return None
    return {
        **probe,
        "prompt_tokens": result["prompt_tokens"],
        "token_ids": list(result["token_ids"]),
        "logprobs": [round(entry["logprob"], 4) for entry in result["logprobs"]],
    }


def ask(engine: Engine, probe: Mapping[str, Any]) -> dict[str, Any]:
    """One probe, alone."""
    return engine.generate(probe["prompt"], **probe["wanted"], logprobs=0)


@dataclass(frozen=True)
class Parting:
    """The first token in which a probe's answer differs from the locked one, with the scores of both
    tokens here (natural log-probabilities before temperature), and of the locked one then. None: the
    answer ends there."""

    probe: str
    at: int
    locked: int | None
    came: int | None
    locked_then: float | None
    locked_here: float | None
    came_here: float | None
    words: tuple[str, str]

    def __str__(self) -> str:
        then = "" if self.locked_then is None else f"{_score(self.locked_then)} then, "
        return (
            f"probe {self.probe}: token {self.at} differs: {_token(self.locked, self.words[0])} was locked "
            f"({then}{_score(self.locked_here)} here), {_token(self.came, self.words[1])} came "
            f"({_score(self.came_here)} here)"
        )


def _token(token: int | None, word: str) -> str:
    return "the end" if token is None else f"{token} {word!r}"


def _score(value: float | None) -> str:
    return "no score" if value is None else f"{value:.4f}"


def replayed(
    engine: Engine, probes: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int, Parting | None]]:
    """(name, tokens compared, where it parts or None) of each probe, as they are asked."""
    for probe in probes:
        ids = list(ask(engine, probe)["token_ids"])
        yield probe["name"], len(probe["token_ids"]), _parting(engine, probe, ids)


def _parting(engine: Engine, probe: Mapping[str, Any], ids: list[int]) -> Parting | None:
    locked = list(probe["token_ids"])
    if ids == locked:
        return None
    pairs = zip(locked, ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(locked), len(ids)))
    was, came = (tokens[at] if at < len(tokens) else None for tokens in (locked, ids))
    before = [*_prompt(engine, probe["prompt"]), *locked[:at]]
    then = probe["logprobs"][at] if was is not None else None
    decode = engine.tokenizer.decode
    words = tuple("" if token is None else decode([token]) for token in (was, came))
    scores = (_scored(engine, before, was), _scored(engine, before, came))
    return Parting(probe["name"], at, was, came, then, *scores, words)  # type: ignore[arg-type]


def _prompt(engine: Engine, text: str) -> list[int]:
    """The prompt's ids, as the engine makes them."""
    tokenizer = engine.tokenizer
    if tokenizer.template is None:
        return list(tokenizer.encode(text))
    return list(tokenizer.render([{"role": "user", "content": text}], {}))


def _scored(engine: Engine, before: Sequence[int], token: int | None) -> float | None:
    """The log-probability of a token after these, in the model that is open."""
    if token is None:
        return None
    result = engine.generate([*before, token], max_tokens=0, prompt_logprobs=0)
    return float(result["prompt_logprobs"][-1]["logprob"])
