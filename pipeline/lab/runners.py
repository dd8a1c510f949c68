"""Where the points of a sweep run: one after the other here, or as tasks of a Ray cluster."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import OpenError
from pipeline.lab.children import Child
from pipeline.lab.jobs import Job, parse

Found = tuple[int, Mapping[str, Any]]  # the job's place, and its result or why there is none
ROOT = Path(__file__).parents[2]


class Runner(Protocol):
    """Runs jobs, and gives each one's result as it comes. Results of one `place` say nothing of another."""

    @property
    def place(self) -> Mapping[str, Any]: ...

    def __call__(self, jobs: Sequence[Job], /) -> Iterator[Found]: ...


def run_here(job: str) -> Mapping[str, Any]:
    """One job in a process of its own, which ends if this one does."""
    with tempfile.TemporaryFile() as told:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": told}
        env = {**os.environ, "PYTHONPATH": _path()}
        with Child(["-m", "pipeline.lab.jobs"], text=True, env=env, **pipes) as child:
            try:
                text, _ = child.communicate(f"{job}\n")
            finally:
                code = child.end()
        told.seek(0)
        return parse(text, code, told.read().decode(errors="replace"))


def _path() -> str:
    """The same sources as here, whatever is installed."""
    before = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{before}" if before else str(ROOT)


class LocalRunner:
    """One at a time: two on one machine would measure each other."""

    place: Mapping[str, Any] = {}

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Found]:
        for index, job in enumerate(jobs):
            yield index, run_here(job.to_json())


class RayRunner:
    """Tasks on a Ray cluster: a new one on this machine, or the one at `address`, whose machines must
    have this version of Headrace and the recipe's files under the same paths. `cpus` a task is how
    many of a machine's a point has for itself. OpenError if ray is not installed or nobody answers."""

    def __init__(self, address: str | None = None, cpus: int = 1, workers: int | None = None):
        self.address, self.cpus, self.workers = address, cpus, workers
        self.place = {"ray": address, "cpus": cpus}

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Found]:
        ray = _ray()
        self._connect(ray)
        try:
            yield from self._results(ray, jobs)
        finally:
            ray.shutdown()

    def _connect(self, ray: Any) -> None:
        here = {"num_cpus": self.workers, "include_dashboard": False} if not self.address else {}
        environment = {} if self.address else {"env_vars": {"PYTHONPATH": _path()}}
        try:
            _reach(self.address)
            ray.init(
                address=self.address or "local", runtime_env=environment, log_to_driver=False,
                logging_level="error", **here,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError) as error:
            what = f"ray: no cluster at {self.address or 'this machine'}: {error}"
            raise OpenError(
                f"{what}. Start one (ray start --head), or use --runner local"
            ) from error

    def _results(self, ray: Any, jobs: Sequence[Job]) -> Iterator[Found]:
        task = ray.remote(num_cpus=self.cpus, max_retries=0, scheduling_strategy="SPREAD")(
            on_worker
        )
        places = {task.remote(job.to_json()): index for index, job in enumerate(jobs)}
        while places:
            (ready,), _ = ray.wait(list(places), num_returns=1)
            index = places.pop(ready)
            try:
                yield index, ray.get(ready)
            except ray.exceptions.RayError as error:
                yield (
                    index,
                    {"status": "failed", "reason": f"ray: {' '.join(str(error).split())[:500]}"},
                )


def on_worker(job: str) -> dict[str, Any]:
    """A Ray task: the job in a process of its own, and which of Ray's workers started it."""
    from pipeline.lab.runners import run_here

    return {**run_here(job), "worker": os.getpid()}


def _reach(address: str | None) -> None:
    """OSError at once if nobody listens there; Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise OpenError(f"--runner ray: {error}. Try: pip install 'headrace[ray]'") from error
