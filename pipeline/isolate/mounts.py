"""Adapters of an engine in a process of its own; a process that takes another's place has the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.engine import Engine
from pipeline.errors import HeadraceError

MOUNT_S = 600.0  # running answers end first

Change = tuple[str, float] | None  # folder on the shelf and scale; None: unmounted


class FarMounts:
    """`Engine.adapters`, asked from afar. `ids` are those that are mounted, known without asking."""

    def __init__(self, ask: Callable[..., Any]):
        self._ask = ask
        self.ids: list[str] = []
        self._changes: dict[str, Change] = {}

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("adapters")
        return found

    def mount_shelved(self, name: str, folder: str, scale: float) -> dict[str, Any]:
        asked = {"name": name, "folder": folder, "scale": scale}
        done = partial(self._changed, name, (folder, scale))
        found: dict[str, Any] = self._ask("mount_adapter", MOUNT_S, done, **asked)
        return found

    def unmount(self, name: str) -> None:
        self._ask("unmount_adapter", MOUNT_S, partial(self._changed, name, None), name=name)

    def _changed(self, name: str, change: Change) -> None:
        """As soon as the process says so, even if who asked has stopped waiting: another process may be
        started next."""
        others = [known for known in self.ids if known != name]
        self.ids = others if change is None else [*others, name]
        self._changes[name] = change

    def served(self, served: Any) -> Any:
        """What the next process serves: what the first one did, with all that has changed since."""
        return Remounted(served, dict(self._changes)) if self._changes else served


@dataclass(frozen=True)
class Remounted:
    """Opened, and then as it was. What cannot be mounted any more is missing by name."""

    served: Any
    changes: Mapping[str, Change]

    def open(self) -> Engine:
        engine: Engine = self.served.open()
        mounts = engine.adapters
        there = {told["id"] for told in mounts.listed()}
        gone = [name for name, change in self.changes.items() if change is None]
        for name in there.intersection(gone):  # first: they leave room
            _try(name, partial(mounts.unmount, name))
        for name, change in self.changes.items():
            if change is not None:
                _try(name, partial(mounts.mount_shelved, name, *change))
        return engine


def _try(name: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except HeadraceError as error:
        log = logging.getLogger("headrace.isolate")
        log.error("adapter %s is not as it was: %s", name, error)
