"""What must not be written down: values from the environment, and what looks like a key.

A value from the environment is kept as the reference it was (`${oc.env:NAME}`), and read there again when
the lock is served. A key that stood in the recipe or on the command line becomes `???`: it has to be said
again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from pipeline.compose import literal

HIDDEN = "???"
DEFAULT = re.compile(r"(\$\{oc\.env:\w+),[^}]*\}")
ENVIRONMENT = "environment "
NAMED = re.compile(r"(^|_)(api_?key|key|secret|token|password|passwd|credentials?|auth)$", re.I)
SHAPED = re.compile(
    r"\b(sk|pk|rk|hr)-[\w-]{12,}|\bhf_\w{12,}|\bgh[pousr]_\w{20,}|\bAKIA[0-9A-Z]{12,}|"
    r"://[^/\s:@]+:[^/\s@]+@|[?&][\w-]*(key|token|secret|password|auth)=[^&\s]|"
    r"\bBearer\s+\S{8,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)


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


def typed(overrides: Iterable[str]) -> list[str]:
    """Overrides as they may be told to others."""
    pairs = [word.partition("=") for word in overrides]
    return [
        f"{key}{equals}{HIDDEN if secret(key, value) else value}" for key, equals, value in pairs
    ]
