"""Bodies that no endpoint may take: each must be answered by a 4xx."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.lab.soak.questions import Question

VALUES: tuple[Any, ...] = (
    None, [], {}, "", -1, 2**64, 1e308, True, "x" * 5000, [[]], {"type": "none"}, [None], "\ud800",
)  # fmt: skip


def rubbish(draw: random.Random, question: Question) -> bytes:
    """The question's body, spoilt."""
    spoil: Callable[[random.Random, Mapping[str, Any]], bytes] = draw.choice(
        (_cut, _noise, _wrong_prompt, _no_prompt, _deep, _unfit)
    )
    return spoil(draw, question.body)


def _cut(draw: random.Random, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return data[: draw.randrange(len(data))]


def _noise(draw: random.Random, body: Mapping[str, Any]) -> bytes:
    return b"\x00" + draw.randbytes(draw.randrange(400))


def _prompt(body: Mapping[str, Any]) -> str:
    return next(name for name in ("messages", "prompt", "input") if name in body)


def _wrong_prompt(draw: random.Random, body: Mapping[str, Any]) -> bytes:
    wrong = draw.choice(({}, 7, True, [None], [[None]], [{"role": 3}], {"a": [1]}))
    return json.dumps({**body, _prompt(body): wrong}).encode()


def _no_prompt(draw: random.Random, body: Mapping[str, Any]) -> bytes:
    return json.dumps({k: v for k, v in body.items() if k != _prompt(body)}).encode()


def _deep(draw: random.Random, body: Mapping[str, Any]) -> bytes:
    depth = draw.choice((300, 5000, 200_000))
    return b'{"messages":' + b"[" * depth + b"]" * depth + b"}"


def _unfit(draw: random.Random, body: Mapping[str, Any]) -> bytes:
    """A value that the field cannot have."""
    return json.dumps({**body, "stream": draw.choice(("maybe", 7, [], {"a": 1}))}).encode()
