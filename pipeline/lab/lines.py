"""The promised lines. Each measures its contestants in turn and returns its figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.lab.contestants import Field
from pipeline.lab.figures import Figure

T = TypeVar("T")


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Bench:
    """What a line gets: contestants, how many pairs, and which of its figures are wanted."""

    field: Field
    threads: int
    pairs: int = 20
    wanted: Collection[str] = ()
    say: Callable[[str], None] = to_stderr

    def alternate(self, what: str, works: Sequence[Callable[[int], T]]) -> list[list[T]]:
        """Rounds of one result a work. Who begins changes from round to round, so that a machine
        which gets slower or faster meanwhile favours nobody."""
        rounds = []
        for index in range(self.pairs):
            results: dict[int, T] = {}
            for step in range(len(works)):
                at = (index + step) % len(works)
                results[at] = works[at](index)
            rounds.append([results[at] for at in range(len(works))])
            self.say(f"{what}: {index + 1} of {self.pairs}")
        return rounds


@dataclass(frozen=True)
class Line:
    """`figures` are the names of what `run` may return; it may leave out those not in `bench.wanted`."""

    figures: tuple[str, ...]
    run: Callable[[Bench], list[Figure]]
    rivals: bool = False  # needs the float32 folder
    last: tuple[str, ...] = ()  # contestants that no later line needs
