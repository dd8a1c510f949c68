"""What must not be written down: values from the environment, and what looks like a key.

A value from the environment is kept as the reference it was (`${oc.env:NAME}`), and read there again where
what was written is used. A key that stood in the recipe or on the command line becomes `???`: it has to be
said again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from pipeline.compose import compose, literal, read
from pipeline.errors import HeadraceError

HIDDEN = "???"
DEFAULT = re.compile(r"(\$\{oc\.env:\w+),[^}]*\}")
ENVIRONMENT = "environment "
NAMED = re.compile(
    r"(^|[_-])(api[_-]?key|key|secret|token|password|passwd|credentials?|auth|authorization)$", re.I
)
SHAPED = re.compile(
    r"(?<![\w-])hr-[\w-]{43}(?![\w-])|"  # as `headrace key` makes them
    # a long run of letters and digits: `sk-llama-3-8b-instruct` is a model
    r"(?<![\w-])(sk|pk|rk|hr)-([\w-]*[_-])?(?i:(?=[a-z]*\d)(?=\d*[a-z])[a-z\d]{16,})[\w-]*|"
    r"\bhf_\w{12,}|\bgh[pousr]_\w{20,}|\bAKIA[0-9A-Z]{12,}|"
    r"://[^/?#\s@]+(:[^/\s@]+)?@|[?&][\w-]*(key|token|secret|password|auth)=[^&\s]+|"
    r"\bBearer\s+\S{8,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
SHORTEST = 4  # letters of a value that is looked for in messages: "1" stands in all of them


def storable(value: Any, sources: Mapping[str, str], path: str = "") -> Any:
    """Plain data without secrets. `sources` say where the value at a path comes from."""
    source = sources.get(path, "")
    if source.startswith(ENVIRONMENT):
        reference = source.removeprefix(ENVIRONMENT)
        return DEFAULT.sub(r"\1}", reference) if secret(path, reference) else reference
    if isinstance(value, Mapping):
        below = f"{path}." if path else ""
        return {str(k): storable(v, sources, f"{below}{k}") for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [storable(item, sources, f"{path}.{at}") for at, item in enumerate(items)]
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):
        return HIDDEN if secret(path, value) else literal(value)
    return value


def secret(path: str, value: str) -> bool:
    """Whether a text is a key, by the name of its setting or by its looks."""
    named = NAMED.search(path.rpartition(".")[2])
    return bool(value) and bool(named or SHAPED.search(value))


def typed(overrides: Iterable[str]) -> tuple[str, ...]:
    """Overrides as they may be told to others."""
    return tuple(map(_typed, overrides))


def _typed(word: str) -> str:
    key, equals, raw = word.partition("=")
    hidden = any(secret(path, text) for path, text, _ in _texts(read(raw)[0], {}, key))
    return f"{key}{equals}{HIDDEN}" if hidden or secret(key, raw) else word


def words(line: str) -> str:
    """A recipe and its overrides in one text, as they may be told to others."""
    return shlex.join(typed(shlex.split(line)))


def command(
    verb: str, recipe: str, told: Iterable[str], allow: Iterable[str], more: Iterable[object] = ()
) -> str:
    """What is typed to do it again. `told` are overrides as they may be told to others."""
    return shlex.join(["headrace", verb, recipe, *told, *allowing(allow), *map(str, more)])


def allowing(allow: Iterable[str]) -> list[str]:
    """The words by which these packages' classes may run."""
    return [word for prefix in allow for word in ("--allow-code", prefix)]


def untold(message: str, recipe: str, overrides: Sequence[str]) -> str:
    """What is said to whoever gave these overrides, without what `storable` hides of them."""
    hidden = set(_hidden(recipe, overrides)) if message else ()
    for value in sorted(hidden, key=len, reverse=True):
        message = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, message)
    return SHAPED.sub(HIDDEN, message)


def _hidden(recipe: str, overrides: Sequence[str]) -> Iterator[str]:
    with suppress(HeadraceError):  # nothing could be composed, so nothing is known of it
        composed = compose(recipe, overrides)
        for path, text, source in _texts(composed.config, composed.sources):
            kept = not source.startswith(ENVIRONMENT) and not secret(path, text)
            if not kept and len(text) >= SHORTEST:
                yield text


def _texts(
    value: Any, sources: Mapping[str, str], path: str = "", source: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Path, text and source of everything in it that is no mapping and no list."""
    source = sources.get(path, source)
    below = f"{path}." if path else ""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _texts(item, sources, f"{below}{key}", source)
    elif value is not None:
        yield path, str(value), source
