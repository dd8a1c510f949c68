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
from threading import Event
from typing import Any

from pipeline.lab.children import Child, output
from pipeline.lab.matrix.cells import FAMILIES, Axes, Cell, Heads, cells, pairwise
from pipeline.lab.matrix.worker import LENGTH, Outcome, cell_of

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
        with ThreadPoolExecutor(workers) as pool, _stopping(pool) as stop:
            done = [
                pool.submit(_job, job, heads, length, place, report, stop) for job in jobs if job
            ]
            return [outcome for one in done for outcome in one.result()]


@contextmanager
def _stopping(pool: ThreadPoolExecutor) -> Iterator[Event]:
    """If the block ends by an exception (Ctrl-C is one), what runs is not waited for."""
    stop = Event()
    try:
        yield stop
    except BaseException:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def write_heads(folder: Path) -> Heads:
    """Tiny drafter checkpoints in the published layouts."""
    module = ["-m", "stages.drafters.neural.tiny", str(folder), "64", *FAMILIES]
    return Heads(json.loads(output(module)))


def _job(
    job: Sequence[Cell], heads: Heads, length: int, folder: str, report: Report, stop: Event
) -> list[Outcome]:
    asked = {
        "folder": folder,
        "heads": dict(heads.folders),
        "length": length,
        "cells": [asdict(cell) for cell in job],
    }
    found = []
    with closing(_worker(asked)) as outcomes:
        for outcome in outcomes:
            if stop.is_set():
                return []
            report(outcome)
            found.append(outcome)
    if len(found) != (wanted := sum(len(cell.rows) for cell in job)):
        raise MatrixError(f"a worker ended after {len(found)} of {wanted} outcomes")
    return found


def _worker(asked: Mapping[str, Any]) -> Generator[Outcome]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with Child(["-m", "pipeline.lab.matrix.worker"], text=True, **pipes) as process:
        assert process.stdin and process.stdout
        try:
            json.dump(asked, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                yield Outcome(**{**said, "cell": cell_of(said["cell"])})
        finally:
            process.kill()
