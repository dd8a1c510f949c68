"""Runs an experiment's points, each once: what is stored under a point's digest is not run again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.catalog import load_yaml, package_folder
from pipeline.errors import ConfigError, Problem
from pipeline.identity import digest, file_digest
from pipeline.lab.experiment import AS_IT_IS, DEFAULT, Experiment, Point, label
from pipeline.lab.folder import own, sweep_leftovers, write
from pipeline.lab.jobs import FAILED, OK, Job
from pipeline.lab.lock import facts as here
from pipeline.lab.metrics import METRICS
from pipeline.lab.options import key_of
from pipeline.lab.quality import policy_name
from pipeline.lab.runners import Runner
from pipeline.lab.sides import PLACE, Checked
from pipeline.secrets import typed, untold
from pipeline.types.places import user_path


@dataclass
class Row:
    """A point and what is known of it, without secrets: it is written down."""

    number: int  # from 1, as in the report
    own: tuple[str, ...]  # overrides that tell it from others
    overrides: tuple[str, ...]
    digest: str = ""  # empty: it was refused before it could run
    workload: str = ""
    status: str = ""  # ok or failed
    reason: str = ""  # it failed; or whose figures it has
    known: bool = False  # it had been run before
    when: str = ""  # it was run
    kv: str = ""  # the policy, as `headrace quality` names it
    bare: str = AS_IT_IS  # its name where nothing is its own
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.own, self.bare)

    @property
    def contestant(self) -> Mapping[str, Any]:
        return self.result["contestants"][0] if self.status == OK else {}

    def figure(self, metric: str) -> Mapping[str, Any] | None:
        """Median, lowest, highest and samples; None where it has none."""
        found: Mapping[str, Any] | None = self.contestant.get("figures", {}).get(metric)
        return found


Tell = Callable[[Row, int], None]  # a row that is done, and how many there are


def run(
    experiment: Experiment,
    folder: Path,
    runner: Runner,
    tell: Tell,
    finish: Callable[[Path, list[Row]], None] = lambda folder, rows: None,
) -> list[Row]:
    """All rows, in order. ConfigError if no point fits together, or a metric can come of none; before
    that nothing is written. `finish` writes tables and report, while the folder is still ours."""
    rows, jobs = _check(experiment, runner.place)
    with owned(experiment.path, folder):
        _fill(folder, rows, jobs, runner, tell)
        finish(folder, rows)
    return rows


def owned(recipe: Path, folder: Path) -> AbstractContextManager[Path]:
    """The folder, for the points of this recipe, while the block runs. FolderError if another has it."""
    shipped = recipe.is_relative_to(package_folder("recipes"))
    whose = recipe.stem if shipped else str(recipe)
    return own(folder, {"kind": "sweep", "of": whose}, again=True)


def measure(experiment: Experiment, folder: Path, runner: Runner, tell: Tell) -> list[Row]:
    """As `run`, in a folder that is `owned` for longer than these points; those that are the same as an
    earlier one are left out."""
    rows, jobs = _check(experiment, runner.place)
    rows = _once(rows)
    _fill(folder, rows, jobs, runner, tell)
    return rows


def _fill(
    folder: Path, rows: Sequence[Row], jobs: Mapping[int, Job], runner: Runner, tell: Tell
) -> None:
    """What is known is recalled, the others are run, each once."""
    sweep_leftovers(folder)
    points = folder / "points"
    points.mkdir(exist_ok=True)
    once = _once(rows)
    waiting = [row for row in once if row.digest and not _recall(points, row)]
    for row in once:
        if row not in waiting:
            tell(row, len(rows))
    try:
        for index, found in runner([jobs[row.number] for row in waiting]):
            _take(points, waiting[index], jobs[waiting[index].number], found)
            tell(waiting[index], len(rows))
    finally:
        if not any(points.iterdir()):
            points.rmdir()
    measured = {row.digest: row for row in once}
    for row in rows:
        if not row.status:
            _share(row, measured[row.digest])
            tell(row, len(rows))


def _once(rows: Sequence[Row]) -> list[Row]:
    """Without those whose configuration is that of an earlier one."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row.digest or f"refused {row.number}", row)
    return list(found.values())


def _share(row: Row, measured: Row) -> None:
    row.status, row.result, row.when = measured.status, measured.result, measured.when
    row.known = measured.known
    row.reason = f"the same configuration as point {measured.number}"


def _check(experiment: Experiment, place: Mapping[str, Any]) -> tuple[list[Row], dict[int, Job]]:
    """Each point composed: those that do not fit together have failed already."""
    rows: list[Row] = []
    jobs, refused, body = {}, [], load_yaml(experiment.path)
    checked: list[Checked] = []
    facts = {"place": place, "packages": here.packages(), "cores": os.cpu_count()}
    for point in experiment.points:
        job = _job(experiment, point)
        row = Row(len(rows) + 1, typed(point.own), typed(point.overrides), bare=point.bare)
        rows.append(row)
        try:
            checked.append(found := Checked.of(job.recipe, job.overrides, job.allow))
        except ConfigError as error:
            problems = list(_told(error.problems, body, point))
            row.status = FAILED
            row.reason = untold("; ".join(map(str, problems)), job.recipe, job.overrides)
            refused.append(ConfigError(problems))
            continue
        row.workload = str(found.choices["workload"])
        row.kv = policy_name(found.built.composed)
        row.digest = identify(job, found, facts)
        jobs[row.number] = job
    if refused and not checked:
        raise refused[0]
    _given(experiment, checked)
    return rows, jobs


def _told(problems: Sequence[Problem], body: Mapping[str, Any], point: Point) -> Iterator[Problem]:
    """With what to do about settings of the recipe that the option of a point does not take."""
    asked = [key_of(text) for text in point.overrides]
    for problem in problems:
        node: Any = body
        for key in problem.where.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        group, below, _ = problem.where.partition(".")
        if node is None or not below or group not in asked or problem.where in asked:
            yield problem
            continue
        hint = (
            f"The recipe itself sets it, for every point. Take it out of the recipe's '{group}:', "
            f"and say it in sweep.cases beside each {group}=… that takes it."
        )
        yield replace(problem, hint=f"{problem.hint} {hint}".strip())


def _job(experiment: Experiment, point: Point) -> Job:
    return Job(
        experiment.recipe,
        point.overrides,
        experiment.allow,
        experiment.repeats,
        experiment.quality_tokens,
        str(Path.cwd()),
    )


def _given(experiment: Experiment, checked: Sequence[Checked]) -> None:
    """ConfigError for metrics that no workload of these points gives, where nothing but the metrics
    themselves can be meant: what is typed over an experiment may leave some of its columns empty."""
    if not experiment.strict:
        return
    offered = {
        "forms": (any(one.workload.forms for one in checked), "workload=json"),
        "leave": (any(one.workload.leave for one in checked), "workload=mixed"),
        "drafts": (any(one.choices["drafter"] != "none" for one in checked), "drafter=ngram"),
    }
    needs = {name: METRICS[name].gives for name in experiment.metrics}
    missing = [name for name, what in needs.items() if what and not offered[what][0]]
    given = [name for name in experiment.metrics if name not in missing]
    problems = []
    for name in missing:
        what = f"no point gives '{name}' ({METRICS[name].title})."
        hint = f"Add {offered[needs[name]][1]}, or type: --metrics {','.join(given or DEFAULT)}"
        problems.append(Problem("metrics", what, hint))
    if problems:
        raise ConfigError(problems)


def identify(job: Job, checked: Checked, facts: Mapping[str, Any]) -> str:
    """The content address of a point: another digest is another measurement. `facts` are of all points:
    where it runs, packages, cores."""
    server = checked.config["server"]
    asked = {name: value for name, value in server.items() if name not in (*PLACE, "port")}
    requests = checked.workload.path
    parts = checked.built.parts
    return digest(
        {
            **facts,
            "config": {**checked.config, "server": asked},
            "code": here.code(checked.config, _digest),
            "threads": checked.threads,
            "repeats": job.repeats,
            "quality_tokens": job.quality_tokens,
            "requests": _digest(user_path(requests)) if requests else "",
            "artifacts": here.artifacts(checked.built, _digest),
            "platform": here.platform(parts["device"], _digest),
        }
    )


def _digest(path: Path) -> str:
    """Points of a sweep read the same files: each is read once while it stays as it is."""
    told = path.stat()
    return _digest_of(path, told.st_size, told.st_mtime_ns)


@cache
def _digest_of(path: Path, *stamp: int) -> str:
    return file_digest(path)


def _recall(points: Path, row: Row) -> bool:
    """Fill the row from an earlier run. What had failed is tried again."""
    try:
        stored = json.loads((points / f"{row.digest}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if stored.get("status") != OK:
        return False
    row.status, row.result, row.known = OK, stored["result"], True
    row.when = stored["when"]
    return True


def _take(points: Path, row: Row, job: Job, found: Mapping[str, Any]) -> None:
    row.status = str(found["status"])
    reason = untold(str(found.get("reason", "")), job.recipe, job.overrides)
    row.reason = " ".join(reason.split())
    row.result = {k: v for k, v in found.items() if k not in ("status", "reason")}
    row.when = time.strftime("%Y-%m-%d %H:%M:%S")
    write(points / f"{row.digest}.json", json.dumps(asdict(row), indent=1))
