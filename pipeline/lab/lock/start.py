"""From a recipe to a lock, and from a lock to a pipeline that is what was locked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.build import Pipeline, build, open_device
from pipeline.compose import Composed, compose, recompose
from pipeline.engine import Engine
from pipeline.errors import ConfigError, HeadraceError, OpenError, Problem
from pipeline.lab.lock import facts, probes
from pipeline.lab.lock.drift import (
    Difference,
    DriftError,
    check_names,
    differences,
    refused,
    without_newcomers,
)
from pipeline.lab.lock.file import Lock, sealed
from pipeline.plan import plan
from pipeline.secrets import typed

Say = Callable[[str], None]


def make(recipe: str, overrides: Sequence[str], allow: Iterable[str], say: Say) -> Lock:
    """Compose, look at everything, open, ask the probes."""
    built, sections = _built(compose(recipe, overrides), allow)
    if absent := [why for why in sections["artifacts"].values() if isinstance(why, str)]:
        raise OpenError("; ".join(absent))
    if "decode" not in built.phases:
        what = f"flow={built.choices['flow']} answers nothing, so no probe can be asked."
        raise ConfigError([Problem("flow", what, "Lock a recipe that decodes.")])
    say("asking the probes")
    with Engine(built) as engine:
        sections["model"] = facts.of_the_model(engine)
        asked = probes.answered(engine)
    if not asked:
        raise HeadraceError("no probe fits the context: raise limits.context (600 tokens will do)")
    made = {"date": time.strftime("%Y-%m-%d"), "overrides": list(typed(overrides))}
    return sealed(recipe=recipe, made=made, **sections, probes=asked)


def _built(composed: Composed, allow: Iterable[str]) -> tuple[Pipeline, dict[str, Any]]:
    """The pipeline, not open, and all that is known of it."""
    built = build(plan(composed, allow=allow, first=open_device))
    return built, facts.here(built)


class Locked:
    """A lock beside what is here. Nothing is opened; files are read, to compare their digests. `allowed`
    names what may differ."""

    def __init__(
        self, lock: Lock, overrides: Sequence[str], allow: Iterable[str], allowed: Sequence[str]
    ):
        self.allowed, self.sections = allowed, asdict(lock)
        composed = recompose(lock.recipe, lock.config, lock.choices, overrides)
        self.pipeline, here = _built(composed, allow)
        here["artifacts"] = without_newcomers(self.sections["artifacts"], here["artifacts"])
        self.drift: list[Difference] = differences(self.sections, here)

    def check_names(self) -> None:
        """HeadraceError for a name in `allowed` that there is not."""
        check_names(self.allowed, self.sections, self.drift)

    def look_at_the_model(self, engine: Engine) -> list[Difference]:
        """What differs that could not be known before it was open."""
        found = differences(self.sections, {"model": facts.of_the_model(engine)})
        self.drift += found
        return found

    @property
    def refused(self) -> list[Difference]:
        """Every difference that is not allowed."""
        return refused(self.drift, self.allowed)

    def refuse(self, place: str) -> None:
        """DriftError if there are such."""
        if found := self.refused:
            raise DriftError(place, found)
