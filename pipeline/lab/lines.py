"""The promised lines. Each measures its contestants in turn and returns its figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pipeline.lab.contestants import Contestant, Field
from pipeline.lab.figures import Figure

T = TypeVar("T")
FEW = 8  # pairs that decide where the promise is far off


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

    def compare(
        self,
        what: str,
        names: Sequence[str],
        measure: Callable[[Contestant, int], T],
        prepare: Callable[[Contestant], object] = lambda one: None,
    ) -> list[list[T]]:
        """Rounds of one result a contestant, in the order of `names`; `prepare` what is not measured.
        Half of them with servers that were started in the other order: of two alike the later one is
        up to a tenth quicker."""
        half = self.pairs - self.pairs // 2 if len(names) > 1 else self.pairs
        rounds = []
        for order, turns in ((names, range(half)), (names[::-1], range(half, self.pairs))):
            if turns:
                self.field.dismiss(*names)
                self.field.take(*order)
                field = self.field.take(*names)
                for one in field:
                    prepare(one)
                works = [partial(measure, one) for one in field]
                rounds += self.alternate(what, works, turns)
        return rounds

    def alternate(
        self, what: str, works: Sequence[Callable[[int], T]], turns: Sequence[int] | None = None
    ) -> list[list[T]]:
        """Rounds of one result a work, `pairs` or those of `turns`. Who begins changes from round to
        round, so that a machine which gets slower or faster meanwhile favours nobody."""
        rounds = []
        for index in range(self.pairs) if turns is None else turns:
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
    most: int = 100  # pairs, however many are asked for
