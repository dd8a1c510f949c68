"""Errors as plain data: what a client or the command line is told is the same in both processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    GraphError,
    HeadraceError,
    OpenError,
    Problem,
    RequestError,
)

LISTS: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (ConfigError, GraphError)
}
KNOWN: Mapping[str, Callable[..., Exception]] = {
    kind.__name__: kind for kind in (OpenError, RequestError, BusyError, ClosedError)
}


@dataclass(frozen=True)
class Fault:
    """An exception: the name of its class, what it says, and what else is known of it."""

    type: str
    message: str
    mendable: bool = False  # by the user: of our family
    problems: tuple[Problem, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # of a KNOWN class, its attributes

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        ours = isinstance(error, HeadraceError)
        plain = isinstance(error, ValueError) and not ours  # is caught as one, whichever it is
        name = "ValueError" if plain else type(error).__name__
        problems = error.problems if isinstance(error, ConfigError) else ()
        facts = dict(vars(error)) if ours and name in KNOWN else {}
        facts.pop("__notes__", None)
        return cls(name, str(error), ours, problems, facts)

    def error(self) -> Exception:
        """An exception that is told like the one it was made of."""
        if self.type in LISTS:
            return LISTS[self.type](self.problems)
        if self.type in KNOWN:
            return KNOWN[self.type](self.message, **self.facts)
        if self.mendable:
            return HeadraceError(self.message)
        if self.type == "ValueError":
            return ValueError(self.message)
        foreign: type[Exception] = type(self.type, (Exception,), {})
        return foreign(self.message)
