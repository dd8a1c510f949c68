"""What `serve` serves, as something that can be handed to another process and opened there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.cli import say_warnings_plainly
from pipeline.cli.show_verb import describe_choices
from pipeline.compose import Composed, compose, recompose
from pipeline.engine import Engine
from pipeline.lab.lock.file import Lock, read
from pipeline.server import journal

if TYPE_CHECKING:
    from pipeline.build import Pipeline


@dataclass(frozen=True)
class Recipe:
    """Composed once, so that whoever opens it, now or after a crash, serves the same."""

    composed: Composed
    allow: Sequence[str]

    @classmethod
    def of(cls, recipe: str, overrides: Sequence[str], allow: Sequence[str]) -> Recipe:
        return cls(compose(recipe, overrides), tuple(allow))

    @property
    def config(self) -> Mapping[str, Any]:
        return self.composed.config

    def open(self) -> Engine:
        """Says what was chosen, then loads it."""
        from pipeline.build import build, open_device
        from pipeline.plan import plan

        built = build(plan(self.composed, allow=self.allow, first=open_device))
        _begin(built)
        engine = Engine(built)
        engine.open()
        return engine


@dataclass(frozen=True)
class Locked:
    """A lock as it was read; what is here must still be that. `allowed`: what may differ; `again`: it has been
    opened before, so those names were right, though what one stood for may be gone by now."""

    place: str
    lock: Lock
    overrides: Sequence[str]
    allow: Sequence[str]
    allowed: Sequence[str]
    again: bool = False

    @classmethod
    def of(
        cls, place: str, overrides: Sequence[str], allow: Sequence[str], drift: Sequence[str]
    ) -> Locked:
        return cls(place, read(place), tuple(overrides), tuple(allow), drift)

    @property
    def config(self) -> Mapping[str, Any]:
        lock = self.lock
        return recompose(lock.recipe, lock.config, lock.choices, self.overrides).config

    def open(self) -> Engine:
        """Opened, and found to be what was locked; DriftError lists all that is not."""
        from pipeline.lab.lock import start

        locked = start.Locked(self.lock, self.overrides, self.allow, self.allowed)
        if not self.again:
            locked.check_names()
        locked.refuse(self.place)
        _begin(locked.pipeline)
        engine = Engine(locked.pipeline)
        engine.open()
        try:
            locked.look_at_the_model(engine)
            locked.refuse(self.place)
        except Exception:
            engine.close()
            raise
        for one in locked.drift:
            print(f"allowed: {one.told('here')}", flush=True)
        return engine


@dataclass(frozen=True)
class Apart:
    """Opened in a process that has nothing to say by itself: it talks as this one would."""

    served: Recipe | Locked

    def open(self) -> Engine:
        journal.begin()
        say_warnings_plainly()
        return self.served.open()

    @property
    def again(self) -> Apart:
        """What is opened after a crash."""
        served = self.served
        return Apart(replace(served, again=True)) if isinstance(served, Locked) else self


def isolated(served: Recipe | Locked) -> bool:
    """Whether the engine is to have a process of its own. No class judges the value before that process
    does; what is no yes is for the plan to refuse."""
    server = served.config.get("server")
    said = server.get("isolate") if isinstance(server, Mapping) else False
    return str(said).lower() == "true"


def _begin(built: Pipeline) -> None:
    """What is wrong with files, or taken by others, is said before a model is loaded."""
    settings = built.settings["server"]
    settings.read_files()
    journal.begin(settings.log)
    print(summary(built), flush=True)
    if not settings.isolate:  # there it is another process that listens, maybe for a while already
        settings.try_listening()


def summary(built: Pipeline) -> str:
    """What was chosen, and the stages of each phase in one line each."""
    lines = [f"  {phase:<8} {' → '.join(names)}" for phase, names in built.phases.items() if names]
    return "\n".join([describe_choices(built.choices), *lines])
