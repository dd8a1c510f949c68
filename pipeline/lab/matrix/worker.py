"""Tries cells, in a process of its own: `python -m pipeline.lab.matrix.worker`.

Standard input: {"folder", "heads", "length", "cells"}; standard output: one JSON line a cell and number
of rows, in order.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pipeline
from pipeline.engine import Engine
from pipeline.errors import HeadraceError
from pipeline.lab.capabilities import layer_map
from pipeline.lab.matrix.cells import CONSTRAINTS, ROWS, Cell, Heads, plain, settings
from pipeline.lab.matrix.trial import Ids, Trial, alone, requests

LENGTH = 16  # tokens of an answer
Plain = Mapping[int, Sequence[Ids]]  # rows -> answers
Reference = Mapping[str, Plain]  # constraint -> them


@dataclass(frozen=True)
class Outcome:
    """One cell at one number of rows. `outcome`: works | refused | fails; `note` says why."""

    cell: Cell
    rows: int
    outcome: str
    note: str = ""
    tokens: int = 0
    drafted: int = 0


class RefusedError(Exception):
    """A combination that cannot be checked or opened. What goes wrong later is no refusal but a failure."""


class Worker:
    """Keeps what cells have in common: a family's map of layers, and the plain answers."""

    def __init__(self, folder: Path, heads: Heads, length: int = LENGTH):
        self.folder, self.heads, self.length = folder, heads, length
        self._maps: dict[str, str] = {}
        self._plain: dict[tuple[str, str], Reference | RefusedError] = {}

    def run(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        for number, cell in enumerate(cells):
            yield from self.outcomes(cell, number)

    def outcomes(self, cell: Cell, number: int) -> Iterator[Outcome]:
        """One a number of rows; where something is thrown, that is what comes of those which are left."""
        left = list(cell.rows)
        try:
            expected = self.plain(cell)
            own = settings(cell, self.heads, self.map(cell.family))
            own += self._disk(cell, number)
            with closing(_open(own)) as engine:
                trial = Trial(engine, cell, expected, self.length)
                while left:
                    found = trial.run(left[0])
                    note = "; ".join(found.faults)
                    said = (found.tokens, found.drafted)
                    yield Outcome(cell, left.pop(0), "fails" if note else "works", note, *said)
        except Exception as error:
            outcome = "refused" if isinstance(error, RefusedError) else "fails"
            note = _plainly(error) or type(error).__name__
            yield from (Outcome(cell, rows, outcome, note) for rows in left)

    def _disk(self, cell: Cell, number: int) -> list[str]:
        place = self.folder / f"states-{number}-{cell.family}-{cell.drafter}-{cell.kv}"
        return [f"tier.disk.path={place}", "tier.disk.reserve_gb=0"]

    def plain(self, cell: Cell) -> Plain:
        """Rows -> answers of plain decoding. A refusal is remembered too, and raised for each cell."""
        key = (cell.family, cell.kv)
        if key not in self._plain:
            self._plain[key] = self._decoded(cell)
        found = self._plain[key]
        if isinstance(found, RefusedError):
            raise found
        return found[cell.constraint]

    def _decoded(self, cell: Cell) -> Reference | RefusedError:
        """For every constraint, in one engine that takes forms: who asks for none gets the same tokens."""
        own = plain(replace(cell, constraint=CONSTRAINTS[-1]), self.map(cell.family))
        try:
            with closing(_open(own)) as engine:
                return {name: self._answers(engine, name) for name in CONSTRAINTS}
        except RefusedError as refused:
            return refused

    def _answers(self, engine: Engine, constraint: str) -> Plain:
        asked = {rows: requests(rows, constraint, self.length) for rows in ROWS}
        return {
            rows: [result["token_ids"] for result in alone(engine, mine)]
            for rows, mine in asked.items()
        }

    def map(self, family: str) -> str:
        """A map of the family's own layers, for kv=per_layer."""
        if family not in self._maps:
            native = plain(Cell("none", "native", family), "")
            with closing(_open(native)) as engine:
                self._maps[family] = str(layer_map(engine.pipeline.parts["model"], self.folder))
        return self._maps[family]


def _open(settings: Sequence[str]) -> Engine:
    """An open engine of the tiny model."""
    try:
        engine = pipeline.load("tiny", *settings)
        engine.open()
    except HeadraceError as error:
        raise RefusedError(str(error)) from error
    return engine


def cell_of(said: Mapping[str, Any]) -> Cell:
    """A cell that was JSON."""
    return Cell(**{**said, "rows": tuple(said["rows"])})


def _plainly(error: Exception) -> str:
    """One line, without folders."""
    words = " ".join(str(error).split()).removeprefix("- ").split(" ")
    return " ".join(word.rsplit("/", 1)[-1] for word in words)


def main() -> int:
    asked: dict[str, Any] = json.load(sys.stdin)
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    worker = Worker(Path(asked["folder"]), Heads(asked["heads"]), asked["length"])
    with suppress(BrokenPipeError):
        for outcome in worker.run([cell_of(said) for said in asked["cells"]]):
            print(json.dumps(asdict(outcome)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
