"""API keys: made here, told once, and kept as hashes only.

A key has 256 random bits, so that a plain SHA-256 of it can be kept: nobody finds it by guessing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.catalog import read_yaml
from pipeline.errors import ConfigError, Problem, nearest
from pipeline.types.places import user_path

WHERE = "server.keys"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # also a folder's name
HINT = "Make a key and its line: headrace key NAME"


class Key(BaseModel):
    """One entry of the file, under its name. Limits that are not said are none."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    rate: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None  # a minute
    concurrent: Annotated[int, Field(ge=1)] | None = None  # requests at a time
    priority: Annotated[int, Field(ge=-8, le=8)] = 0
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    admin: bool = False


class Keyring:
    """All keys, by name."""

    def __init__(self, keys: Mapping[str, Key]):
        self.keys = dict(keys)
        self._digests = [(bytes.fromhex(key.sha256), name) for name, key in self.keys.items()]

    def find(self, secret: bytes) -> str | None:
        """The name of this key. It is held against every one, so that the time it takes tells nothing."""
        digest = hashlib.sha256(secret).digest()
        found = [name for one, name in self._digests if hmac.compare_digest(one, digest)]
        return found[0] if found else None


def make_key() -> tuple[str, str]:
    """A new key, and its hash."""
    secret = f"hr-{secrets.token_urlsafe(32)}"
    return secret, hashlib.sha256(secret.encode()).hexdigest()


def read_keys(source: str) -> Keyring:
    """From a file, or from `env:VARIABLE`. ConfigError lists all that is wrong."""
    value = _content(source)
    if not isinstance(value, Mapping) or not value:
        raise ConfigError([Problem(WHERE, f"{source} holds no keys by name.", HINT)])
    read = {str(name): _read(name, entry) for name, entry in value.items()}
    problems = [problem for key in read.values() if not isinstance(key, Key) for problem in key]
    keys = {name: key for name, key in read.items() if isinstance(key, Key)}
    if problems := [*problems, *_twice(keys)]:
        raise ConfigError(problems)
    return Keyring(keys)


def _content(source: str) -> Any:
    variable = source.removeprefix("env:")
    if variable == source:
        return read_yaml(_text(source), f"{WHERE} {source}")
    if not (text := os.environ.get(variable)):
        raise ConfigError([Problem(WHERE, f"the environment has no {variable}.", HINT)])
    return read_yaml(text, f"{WHERE} {source}")


def _text(file: str) -> str:
    try:
        return user_path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(WHERE, f"{file} cannot be read: {error}.", HINT)]) from None


def _read(name: Any, entry: Any) -> Key | list[Problem]:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        what = "a key's name has small letters, digits, _ and -, 64 at most."
        return [Problem(f"{WHERE} {str(name)[:64]!r}", what)]
    try:
        return Key.model_validate(entry)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    return [_problem(f"{WHERE} {name}", *map(str, fault["loc"]), said=fault) for fault in faults]


def _problem(where: str, *place: str, said: Mapping[str, Any]) -> Problem:
    """What pydantic says of an entry, in words for whoever wrote the file. Repeats no value: it may be a key."""
    where = ".".join([where, *place])
    match said["type"]:
        case "extra_forbidden":
            fields = list(Key.model_fields)
            hint = " ".join(
                filter(None, [nearest(place[-1], fields), f"It takes: {', '.join(fields)}."])
            )
            return Problem(where, f"a key takes no {place[-1]!r}.", hint)
        case "missing" | "string_pattern_mismatch":
            return Problem(where, "wants the 64 digits of the key's SHA-256.", HINT)
        case "model_type":
            return Problem(where, "wants {sha256: …}, never the key itself.", HINT)
    return Problem(where, f"{said['msg']}.")


def _twice(keys: Mapping[str, Key]) -> Iterator[Problem]:
    owners: dict[str, str] = {}
    for name, key in keys.items():
        if (other := owners.setdefault(key.sha256, name)) != name:
            yield Problem(f"{WHERE} {name}", f"has the same hash as {other}.", HINT)


def presented(headers: Sequence[tuple[bytes, bytes]]) -> set[bytes]:
    """Every key that a request brings, in either family's header."""
    found = set()
    for name, value in headers:
        scheme, _, token = value.strip().partition(b" ")
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization" and scheme.lower() == b"bearer":
            found.add(token.strip())
    return found - {b""}
