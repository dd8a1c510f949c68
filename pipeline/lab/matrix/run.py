"""All cells, in worker processes: one a family, since what cells have in common is the family's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from pipeline.lab.children import Child, output
from pipeline.lab.matrix.cells import FAMILIES, Axes, Cell, Heads, cells, pairwise
from pipeline.lab.matrix.worker import LENGTH, Outcome, cell_of

WORKER = ("-m", "pipeline.lab.matrix.worker")
COVERED = 8  # tokens of an answer where only a cover is tried
Report = Callable[[Outcome], None]


class MatrixError(RuntimeError):
    """A worker ended before its cells did: our fault."""


def run(axes: Axes, *, cover: bool, workers: int, report: Report) -> list[Outcome]:
    """Try all cells (`cover`: a pairwise cover of them) in `workers` processes at a time; `report` is
    called for each outcome as it comes, from any thread. Outcomes in the order of the cells."""
    with TemporaryDirectory(prefix="headrace-matrix-") as place:
        heads = write_heads(Path(place))
        wanted = list((pairwise if cover else cells)(axes, heads))
        length = COVERED if cover else LENGTH
        jobs = [[c for c in wanted if c.family == family] for family in axes.family]
        with ThreadPoolExecutor(workers) as pool, _stopping(pool) as under_way:
            done = [
                pool.submit(_job, job, heads, length, place, report, under_way)
                for job in jobs
                if job
            ]
            return [outcome for one in done for outcome in one.result()]


class UnderWay:
    """Worker processes that run, until no more are wanted."""

    def __init__(self) -> None:
        self.stopped = False
        self._lock, self._processes = Lock(), list[Child]()

    def add(self, process: Child) -> None:
        with self._lock:
            self._processes.append(process)
            if self.stopped:
                process.kill()

    def stop(self) -> None:
        """At once, whatever they do: the pool waits for their ends, and a cell may hang."""
        with self._lock:
            self.stopped = True
            for process in self._processes:
                process.kill()


@contextmanager
def _stopping(pool: ThreadPoolExecutor) -> Iterator[UnderWay]:
    """If the block ends by an exception (Ctrl-C is one), what runs is not waited for."""
    under_way = UnderWay()
    try:
        yield under_way
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        under_way.stop()
        raise


def write_heads(folder: Path) -> Heads:
    """Tiny drafter checkpoints in the published layouts."""
    module = ["-m", "stages.drafters.neural.tiny", str(folder), "64", *FAMILIES]
    return Heads(json.loads(output(module)))


def _job(
    job: Sequence[Cell],
    heads: Heads,
    length: int,
    folder: str,
    report: Report,
    under_way: UnderWay,
) -> list[Outcome]:
    asked = {
        "folder": folder,
        "heads": dict(heads.folders),
        "length": length,
        "cells": [asdict(cell) for cell in job],
    }
    found = []
    with closing(_worker(asked, under_way)) as outcomes:
        for outcome in outcomes:
            if under_way.stopped:
                return []
            report(outcome)
            found.append(outcome)
    if len(found) != (wanted := sum(len(cell.rows) for cell in job)):
        raise MatrixError(f"a worker ended after {len(found)} of {wanted} outcomes")
    return found


def _worker(asked: Mapping[str, Any], under_way: UnderWay) -> Generator[Outcome]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Child(WORKER, text=True, **pipes) as process:
        under_way.add(process)
        assert process.stdin and process.stdout
        try:
            json.dump(asked, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                yield Outcome(**{**said, "cell": cell_of(said["cell"])})
        finally:
            process.kill()
