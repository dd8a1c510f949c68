"""Who is measured: a recipe with its overrides, or mlx-lm's server with the same weights."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.build import Pipeline, build
from pipeline.compose import compose
from pipeline.errors import ConfigError, Problem
from pipeline.lab.children import output
from pipeline.lab.contestants import headrace, mlx_lm, threads_here
from pipeline.lab.workload import Workload
from pipeline.plan import plan
from pipeline.secrets import allowing, storable, typed
from pipeline.types.places import user_path

WORKLOAD = re.compile(r"[~+]*workload\b")
RIVALS: Mapping[str, str] = {"mlx_lm": "shipped", "mlx_lm_blas": "ours"}  # name -> its BLAS
# A measured server is asked here, without a key, and logs to us, whatever its recipe says.
PLACE = {"host": "127.0.0.1", "socket": "null", "keys": "null", "log": "null"}


@dataclass(frozen=True)
class Side:
    """One contestant. `command` starts its server, with `{port}` in it; `prepare` comes before. The others
    are for results: nothing in them is secret."""

    name: str
    command: tuple[str, ...]
    threads: int  # of BLAS
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    prepare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A recipe that fits together: nothing of it is loaded."""

    recipe: str
    overrides: tuple[str, ...]
    allow: tuple[str, ...]
    built: Pipeline
    threads: int  # of BLAS
    asks: Pipeline  # whose workload it is asked

    @classmethod
    def of(
        cls,
        recipe: str,
        overrides: Sequence[str],
        allow: Sequence[str] = (),
        beside: Checked | None = None,
    ) -> Checked:
        """ConfigError or GraphError with all that is wrong. What it is measured beside gives the workload,
        and the threads where it sets none."""
        built = build(plan(compose(recipe, overrides), allow=allow))
        usual = beside.threads if beside else threads_here()
        threads = built.config["device"].get("threads") or usual
        asks = beside.asks if beside else built
        checked = cls(recipe, tuple(overrides), tuple(allow), built, threads, asks)
        if problems := _problems(checked.workload, checked.choices, built.phases):
            raise ConfigError(problems)
        return checked

    @property
    def choices(self) -> Mapping[str, Any]:
        return {**self.built.choices, "workload": self.asks.choices["workload"]}

    @property
    def config(self) -> Mapping[str, Any]:
        """As JSON has it."""
        found: Mapping[str, Any] = plain(self.built.config)
        return {**found, "workload": plain(self.asks.config["workload"])}

    @property
    def workload(self) -> Workload:
        found: Workload = self.asks.settings["workload"]
        return found

    @property
    def name(self) -> str:
        return Path(self.recipe).stem

    def side(self, name: str, folder: Path) -> Side:
        """What it writes to a disk tier goes to `folder`, unless the recipe says where: a measurement
        finds no state of an earlier one, and leaves none."""
        own = [*self.overrides, *(f"server.{name}={value}" for name, value in PLACE.items())]
        disk = (self.config.get("tier") or {}).get("disk")
        if disk is not None and disk.get("path") is None:
            own.append(f"tier.disk.path={folder / name}")
        command = [*headrace(self.recipe, *own, threads=self.threads), *allowing(self.allow)]
        said, told = typed(self.overrides), _told(self.built)
        told["device"]["threads"] = self.threads
        told["workload"] = _told(self.asks)["workload"]
        return Side(name, tuple(command), self.threads, self.recipe, said, dict(self.choices), told)


def _told(built: Pipeline) -> dict[str, Any]:
    """Its configuration without secrets."""
    found: dict[str, Any] = storable(built.config, built.composed.sources)
    return found


def _problems(
    workload: Workload, choices: Mapping[str, Any], phases: Mapping[str, Any]
) -> list[Problem]:
    found = []
    if workload.forms and choices["constraint"] == "none":
        what = "asks for answers by a JSON schema, and constraint=none knows no forms."
        found.append(Problem("workload", what, "Add constraint=llguidance"))
    if not phases.get("decode"):
        what = f"flow={choices['flow']} answers nothing, so there is nothing to measure."
        found.append(Problem("flow", what, "Try: flow=plain, or headrace quality RECIPE"))
    workload.arrivals(0)  # a file that cannot be read says so
    return found


def plain(value: Any) -> Any:
    """As JSON has it: lists for tuples and sets, text for paths."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def against(name: str, ours: Checked) -> Checked | str:
    """The other contestant: a rival's name, or a recipe, with overrides of its own in one text."""
    if name in RIVALS:
        if ours.workload.forms:
            what = f"{name}'s server does not know the forms that this workload asks for."
            raise ConfigError([Problem("--against", what, "Choose another workload.")])
        _weights(ours)
        return name
    try:
        recipe, *overrides = shlex.split(name)
    except ValueError:  # no word, or a quote that is left open
        what = f"wants {', '.join(RIVALS)}, or a recipe with its overrides, got '{name}'."
        hint = "Try: --against 'smollm2 kv=kv4'"
        raise ConfigError([Problem("--against", what, hint)]) from None
    if asks := [text for text in overrides if WORKLOAD.match(text)]:
        what = f"both sides are asked the recipe's workload: {asks[0]} would change nothing."
        raise ConfigError([Problem("--against", what, "Type it before --against.")])
    try:
        return Checked.of(recipe, overrides, ours.allow, beside=ours)
    except ConfigError as error:
        wrong = [replace(problem, where=f"--against {problem.where}") for problem in error.problems]
        raise type(error)(wrong) from error


def _weights(ours: Checked) -> str:
    """The folder that mlx-lm loads; empty for SmolLM2, whose float32 weights are written for it."""
    model = ours.choices["model"]
    if model == "local":
        return str(user_path(ours.config["model"]["path"]))
    if model == "smollm2":
        return ""
    what = f"mlx-lm cannot load model={model}: it reads folders in Hugging Face's layout."
    raise ConfigError([Problem("--against", what, "Try: model=smollm2, or model=local")])


def rival(name: str, ours: Checked, folder: Path) -> Side:
    """mlx-lm's own server on the same weights."""
    weights = _weights(ours)
    where = Path(weights) if weights else folder / "smollm2-float32"
    prepare = () if weights else ("-m", "stages.baseline", "prepare", str(where))
    command = mlx_lm(where, RIVALS[name], ours.threads)
    return Side(name, tuple(command), ours.threads, prepare=prepare)


def prepare(side: Side) -> None:
    """BenchError if its weights could not be written."""
    if side.prepare:
        output(side.prepare)
