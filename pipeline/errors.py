"""Every error a user can cause, in one family.

    HeadraceError (ValueError)
    ├── ConfigError      the recipe or an override is wrong            exit 2, all problems listed
    │   └── GraphError   the stages do not fit together                exit 2, all problems listed
    ├── OpenError        a part could not be opened (missing package, folder, wrong pairing)   exit 2
    ├── RequestError     one request is wrong: HTTP 400 / 413, with `param` and `code`
    ├── BusyError        too much at once: HTTP 429 with Retry-After
    └── ClosedError      the engine has stopped or failed: HTTP 503

Anything else that escapes is our fault: exit 1, HTTP 500.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class HeadraceError(ValueError):
    """Base of all errors that the user can mend."""


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is (config path), what is wrong, what to type next."""

    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f" {self.hint}" if self.hint else "")


class ConfigError(HeadraceError):
    """All problems of a configuration at once, in reading order."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class GraphError(ConfigError):
    """The parts are right one by one, but the pipeline they make is not."""


class OpenError(HeadraceError):
    """A part cannot be opened; the message says what to install or change."""


class RequestError(HeadraceError):
    """One request is wrong. `param` names the field, `code` is OpenAI's machine-readable word."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class BusyError(HeadraceError):
    """The queue is full, or `code` says what else; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str = "queue_full"):
        super().__init__(message)
        self.retry_after_s, self.code = retry_after_s, code


class ClosedError(HeadraceError):
    """The engine does not take requests: it is stopping, its thread has failed, or its process is being
    started again, which should be done in `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


def refuse(**wrong: str) -> None:
    """What is wrong with a constructor's settings, by name; nothing where the text is empty. ValueError
    of one line each, all at once, which `build` puts under their paths."""
    if said := [f"{name}: {what}" for name, what in wrong.items() if what]:
        raise ValueError("\n".join(said))


def below(value: float | None, least: float, unit: str = "") -> str:
    """What is wrong with a setting that must be at least so much; None is no number of its own."""
    fine = value is None or value >= least
    return "" if fine else f"wants >= {least}{unit and ' '}{unit}, got {value}"


def outside(value: float, least: float, most: float) -> str:
    """`below`, and above `most`."""
    return "" if least <= value <= most else f"wants {least:,} to {most:,}, got {value:,}"


def at_least(name: str, value: Any, least: float) -> Any:
    """The value of the only setting that can be wrong."""
    refuse(**{name: below(value, least)})
    return value


def nearest(word: str, known: Iterable[str], path: str = "") -> str:
    """`Did you mean 'x'?` for the known word most like `word`, or an empty string; what it suggests is
    to be typed after `path`."""
    names = [str(name) for name in known]
    match = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    match = match or [name for name in names if len(word) > 2 and name.startswith(word)]
    return f"Did you mean '{path}{match[0]}'?" if match else ""
