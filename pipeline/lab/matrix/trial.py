"""One cell: its engine's answers against those of plain decoding, cold and warm, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import Any

from pipeline.engine import Engine
from pipeline.lab.capabilities import ids
from pipeline.lab.matrix.cells import Cell
from pipeline.lab.together import PATIENCE_S, Running
from pipeline.types import Accepted, Delta, Event, Failed

# Tokens of the prompts: at most two chunks each and the shortest last, so that the second round has all
# four, before any can have ended.
SIZES = (43, 32, 19, 6)
FORM = {"regex": r'\{"river": "[a-z]{3,9}", "length": [0-9]{2,5}\}'}  # much of it is forced
SAMPLED = {"temperature": 0.8, "seed": 7}
GREEDY = {"temperature": 0.0}
Ids = list[int]


@dataclass(frozen=True)
class Asked:
    """One request of a trial."""

    prompt: Sequence[int]
    wanted: Mapping[str, Any]


def requests(rows: int, constraint: str, length: int) -> list[Asked]:
    """Four requests for `length` tokens: long and short, greedy and drawn, half of them with a form where
    forms are taken. Prompts repeat themselves to their end, so that there is something to copy at once;
    no two begin alike, and none is known from the run of another number of rows."""
    forms: list[dict[str, Any]] = [{}, {}, {"grammar": FORM}, {"grammar": FORM}]
    kinds = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    found = []
    for index, (size, kind, form) in enumerate(zip(SIZES, kinds, forms, strict=True)):
        prompt = (ids(7, 10 * rows + index) * 7)[:size]
        wanted = {"max_tokens": length, "ignore_eos": True, **kind}
        wanted |= form if constraint != "none" else {}
        found.append(Asked(prompt, wanted))
    return found


@dataclass
class Verdict:
    """What came of one number of rows: `faults` is empty where every promise held."""

    rows: int
    faults: list[str] = field(default_factory=list)
    drafted: int = 0
    tokens: int = 0


class Trial:
    """One engine under trial. `plain`: rows -> the answers of plain decoding, each alone."""

    def __init__(self, engine: Engine, cell: Cell, plain: Mapping[int, Sequence[Ids]], length: int):
        self.engine, self.cell, self.plain, self.length = engine, cell, plain, length
        self.tiers = engine.pipeline.parts["tier"]

    def run(self, rows: int) -> Verdict:
        """Cold, then warm from every tier, then gone on with after every client has hung up."""
        verdict = Verdict(rows)
        requested = requests(rows, self.cell.constraint, self.length)
        ways: dict[str, Callable[[], None]] = {"cold": lambda: None}
        if len(self.tiers) > 1:
            ways["warm"] = lambda: None
        ways["warm from disk"] = self._forget
        ways["resumed"] = lambda: self._cut_off(requested)
        for name, prepare in ways.items():
            prepare()
            before = self._rounds(rows)
            results = alone(self.engine, requested) if rows == 1 else self._together(requested)
            if self._rounds(rows) == before:
                verdict.faults.append(f"{name}: no round had {rows} rows")
            self._compare(name, results, verdict)
        self._look(verdict)
        return verdict

    def _rounds(self, rows: int) -> int:
        """How many there were of so many rows."""
        widths = self.engine.stats()["widths"]
        return sum(each["rounds"] for each in widths if each["rows"] == rows)

    def _together(self, requested: Sequence[Asked]) -> list[dict[str, Any]]:
        """In one batch, however busy the machine is: nobody starts before all are there, and who has
        its first token before the others waits until what they start from is read."""
        arrived, late = Semaphore(0), set(range(len(requested)))

        def seen(row: int, event: Event) -> None:
            if isinstance(event, Accepted | Failed):
                arrived.release()
            elif late and isinstance(event, Delta):
                late.discard(row)
                self.tiers[-1].store.io.submit(lambda: None).result(PATIENCE_S)

        runs = []
        self.engine.leases.take("trial")
        for row, one in enumerate(requested):
            runs.append(Running(self.engine, one.prompt, seen=partial(seen, row), **one.wanted))
            arrived.acquire(timeout=PATIENCE_S)
        self.engine.leases.release("trial")
        return [run.result() for run in runs]

    def _forget(self) -> None:
        """Write what is kept to disk, and lose the memory of it."""
        report = self.engine.flush()
        assert report["durable"], report
        if len(self.tiers) > 1:
            self.engine.exclusive(self.tiers[0].clear)

    def _cut_off(self, requested: Sequence[Asked]) -> None:
        """Every client hangs up in the middle of its answer; what was captured till then is on disk."""
        hasty = [Hasty(self.length // 2, self.tiers[-1]) for _ in requested]
        runs = [
            Running(self.engine, one.prompt, seen=client, **one.wanted)
            for one, client in zip(requested, hasty, strict=True)
        ]
        for run in runs:
            run.result()

    def _compare(self, name: str, results: Sequence[Any], verdict: Verdict) -> None:
        pairs = zip(results, self.plain[verdict.rows], strict=True)
        for index, (result, expected) in enumerate(pairs):
            got = result["token_ids"]
            verdict.tokens += len(got)
            verdict.drafted += result["speculation"]["drafted"]
            if got != expected:
                at = _parts_at(got, expected)
                verdict.faults.append(f"{name}: request {index} differs from plain at token {at}")
            if bool(result["cached_tokens"]) == (name == "cold"):
                what = "something" if name == "cold" else "nothing"
                verdict.faults.append(f"{name}: of request {index} {what} was reused")
            if name == "resumed" and not result["resumed_tokens"]:
                verdict.faults.append(f"resumed: answer {index} began again")

    def _look(self, verdict: Verdict) -> None:
        """A fault that was mended is no success; nor is a drafter that never drafts."""
        counts = self.engine.stats()["counts"]
        if count := counts.get("faults", 0) + counts.get("draft_faults", 0):
            verdict.faults.append(f"{count} faults were mended")
        if self.cell.drafter != "none" and not verdict.drafted:
            verdict.faults.append("the drafter proposed nothing")


class Hasty:
    """A client that hangs up once it has so many tokens. Each piece waits until what was captured is
    written, so that it does not matter how fast the disk is."""

    def __init__(self, tokens: int, disk: Any):
        self.left, self.disk = tokens, disk

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.disk.queue.settle(wait_s=20.0)
            self.left -= len(event.token_ids)
            if self.left <= 0:
                raise ConnectionError("the client has hung up")


def _parts_at(one: Ids, two: Ids) -> int:
    same = [a == b for a, b in zip(one, two, strict=False)]
    return same.index(False) if False in same else len(same)


def alone(engine: Engine, requested: Sequence[Asked]) -> list[dict[str, Any]]:
    """One after the other."""
    return [engine.generate(one.prompt, **one.wanted) for one in requested]
