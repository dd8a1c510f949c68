"""What a workload's requests say, by kind of text. Deterministic: the same draw gives the same words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.lab import texts
from pipeline.types import Grammar

COPIED = 4  # sentences of a text that is to be copied
EXCHANGES = (("miller", "baker"), ("water", "wine"), ("wheel", "drum"), ("stone", "plate"))
SHARED = "You help the people of a valley. Answer from this report:"
NAMES = ("Tobias", "Agnes", "Ruth", "Jonas", "Marta", "Peter", "Klara", "Anton")
TRADES = ("miller", "farmer", "smith", "baker")
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "trade": {"enum": list(TRADES)},
        "age": {"type": "integer", "minimum": 9, "maximum": 99},
        "owns_a_boat": {"type": "boolean"},
    },
    "required": ["name", "trade", "age", "owns_a_boat"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Words:
    """A user's turn, and the form its answer must have."""

    text: str
    grammar: Grammar | None = None


def chat(draw: random.Random) -> Words:
    return Words(draw.choice(texts.read("questions").splitlines()))


def prose(draw: random.Random) -> Words:
    return Words("Go on with this text in the same manner.")


def copy(draw: random.Random) -> Words:
    return Words(f"Repeat the following text exactly, word for word:\n\n{_sentences(draw)}")


def edit(draw: random.Random) -> Words:
    old, new = draw.choice(EXCHANGES)
    what = f"Write the following text again, but always say {new} instead of {old}:"
    return Words(f"{what}\n\n{_sentences(draw)}")


def form(draw: random.Random) -> Words:
    name, trade, age = draw.choice(NAMES), draw.choice(TRADES), draw.randrange(9, 100)
    what = f"{name} is a {trade} of {age} years and has {draw.choice(('a boat', 'no boat'))}."
    return Words(f"{what} Write this as JSON.", Grammar("json_schema", json.dumps(SCHEMA)))


def _sentences(draw: random.Random) -> str:
    """Some of `mill.txt`, one after the other, so that words recur as they do in a real text."""
    known = texts.read("mill").replace("\n", " ").split(". ")
    start = draw.randrange(len(known) - COPIED)
    return ". ".join(known[start : start + COPIED]).rstrip(".") + "."


def passage(draw: random.Random, words: int) -> str:
    """Prose of so many words that begins like no other."""
    found: list[str] = []
    while len(found) < words:
        found += texts.prose(draw.randrange(10**6)).split()
    return " ".join(found[:words])


def shared(words: int) -> str:
    """A system message of so many words, always the same."""
    known = texts.read("survey").split()
    told = SHARED.split()
    return " ".join((told + known * (1 + words // len(known)))[:words])


KINDS: Mapping[str, Callable[[random.Random], Words]] = {
    "chat": chat,
    "prose": prose,
    "copy": copy,
    "edit": edit,
    "json": form,
}
