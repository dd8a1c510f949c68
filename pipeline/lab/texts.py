"""Prompts of the benchmarks: unique where a cache must not hit, the same where it must."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import resources

Count = Callable[[str], int]  # tokens of a text


def read(name: str) -> str:
    return (resources.files("pipeline.lab") / "texts" / f"{name}.txt").read_text("utf-8").strip()


def prose(seed: int, sentences: int = 0) -> str:
    """`mill.txt` with its sentences in an order of its own, from the first words on. Deterministic."""
    order = random.Random(seed)
    known = read("mill").replace("\n", " ").split(". ")
    chosen: list[str] = []
    while len(chosen) < (sentences or len(known)):
        chosen += order.sample(known, len(known))
    text = ". ".join(sentence.rstrip(".") for sentence in chosen[: sentences or len(known)])
    return f"Chapter {seed}. {text}."


def cut(text: str, tokens: int, count: Count) -> str:
    """The longest beginning of `text`, cut between words, with at most `tokens` tokens."""
    words = text.split(" ")
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count(" ".join(words[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
