"""What a benchmark asks: requests with arrival times, the same for every contestant and every run.

Lengths are in words, not tokens: so a workload knows no tokenizer, and two models get the same texts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import ConfigError, Problem, nearest
from pipeline.lab import prompts
from pipeline.lab.jsonl import Line, read
from pipeline.types import Request, Sampling

FILE = "file"


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes (seconds from the start of a pass), and after how many pieces of its
    answer the client hangs up (None: it stays)."""

    at: float
    request: Request
    leave_after: int | None = None


class Workload:
    """The group `workload`: settings of conf/workload/*.yaml. ConfigError lists all that is wrong.

    `arrivals(turn)` is one pass; another turn has other texts of the same kinds and lengths, so that
    no pass finds its prompts in a cache, except for what the workload shares on purpose.
    """

    def __init__(
        self,
        *,
        texts: list[str] = ["chat"],  # noqa: B006  # never changed
        requests: int = 4,
        clients: int = 1,
        rate: float | None = None,  # requests a second; None: each client waits for its answer
        prompt_words: int = 0,
        shared_words: int = 0,
        max_tokens: int = 64,
        spread: float = 0.0,
        leave: float = 0.0,
        temperature: float = 0.0,
        seed: int = 0,
        path: str | None = None,
    ):
        self.texts, self.requests, self.clients, self.rate = tuple(texts), requests, clients, rate
        self.prompt_words, self.shared_words = prompt_words, shared_words
        self.max_tokens, self.spread, self.leave = max_tokens, spread, leave
        self.temperature, self.seed, self.path = temperature, seed, path
        if problems := [*self._kinds(), *self._ranges()]:
            raise ConfigError(problems)

    def _kinds(self) -> list[Problem]:
        known, where = (*prompts.KINDS, FILE), "workload.texts"
        hint = f"Kinds: {', '.join(known)}."
        found = [
            Problem(where, f"no kind of text '{name}'.", f"{nearest(name, known)} {hint}".strip())
            for name in self.texts
            if name not in known
        ]
        if not self.texts:
            found.append(Problem(where, "wants one kind or more.", hint))
        if FILE in self.texts and len(self.texts) > 1:
            found.append(Problem(where, f"'{FILE}' goes with no other kind.", "Leave it alone."))
        if (FILE in self.texts) != (self.path is not None):
            what = "is the file of workload=jsonl, and of nothing else."
            found.append(Problem("workload.path", what, "Try: workload=jsonl workload.path=FILE"))
        return found

    def _ranges(self) -> list[Problem]:
        bounds = (
            ("requests", 1, 100_000), ("clients", 1, 1024), ("prompt_words", 0, 10**6),
            ("shared_words", 0, 10**6), ("max_tokens", 1, 10**6), ("spread", 0, 1),
            ("leave", 0, 1), ("temperature", 0, 100),
        )  # fmt: skip
        found = [
            Problem(f"workload.{name}", f"wants {low} to {high}, got {getattr(self, name)}")
            for name, low, high in bounds
            if not low <= getattr(self, name) <= high
        ]
        if self.rate is not None and not self.rate > 0:
            found.append(Problem("workload.rate", f"wants more than 0, got {self.rate}"))
        return found

    @property
    def forms(self) -> bool:
        """Some answers must have a form."""
        return "json" in self.texts or any("json_schema" in line for line in self._lines())

    def arrivals(self, turn: int) -> list[Arrival]:
        """Pass number `turn`. ConfigError if the user's file cannot be read or has mistakes."""
        draw = random.Random(f"{self.seed}/{turn}")
        if FILE in self.texts:
            return [self._given(turn, i, line) for i, line in enumerate(self._lines())]
        at, found = 0.0, []
        for index in range(self.requests):
            found.append(replace(self._made(draw, turn, index), at=at))
            at += draw.expovariate(self.rate) if self.rate else 0.0
        return found

    def _lines(self) -> Sequence[Line]:
        return read(self.path) if self.path else ()

    def _made(self, draw: random.Random, turn: int, index: int) -> Arrival:
        words = prompts.KINDS[self.texts[index % len(self.texts)]](draw)
        length = self._length(draw, self.prompt_words)
        before = f"{prompts.passage(draw, length)}\n\n" if length else ""
        told = [{"role": "system", "content": prompts.shared(self.shared_words)}]
        turns = [*(told if self.shared_words else ()), _user(before + words.text)]
        most = max(1, self._length(draw, self.max_tokens))
        leaves = draw.random() < self.leave
        request = Request(
            f"{turn}-{index}",
            messages=tuple(turns),
            sampling=Sampling(temperature=self.temperature, seed=self.seed + index),
            max_tokens=most,
            grammar=words.grammar,
        )
        return Arrival(0.0, request, max(1, most // 2) if leaves else None)

    def _given(self, turn: int, index: int, line: Line) -> Arrival:
        sampling = Sampling(temperature=line.get("temperature", self.temperature))
        wanted = {"max_tokens": self.max_tokens, **line["wanted"]}
        if "seed" in line:
            sampling = replace(sampling, seed=line["seed"])
        request = Request(f"{turn}-{index}", sampling=sampling, **wanted)
        return Arrival(line.get("at", 0.0), request, line.get("leave_after"))

    def _length(self, draw: random.Random, length: int) -> int:
        return round(length * draw.uniform(1 - self.spread, 1 + self.spread)) if length else 0


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
