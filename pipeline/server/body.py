"""From bytes to a clean JSON object, whatever a client sends.

Two rules hold for every string and number in a body, in fields known or not: half surrogates become
U+FFFD, and a number that is not finite (NaN, Infinity, 1e309) is a 400 naming its place.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from pipeline.errors import RequestError
from pipeline.server.errors import invalid
from pipeline.server.pools import Pools
from pipeline.server.settings import ServerSettings

T = TypeVar("T")

_HALF = re.compile("[\ud800-\udfff]")
DEPTH = 100  # of lists and objects in each other
SMALL = 64 << 10  # bytes that are read in less than 10 ms, whatever they are
# in one body, names among them, and how many are lists and objects
VALUES, NESTED = (1 << 18, 1 << 14)
TOO_COMPLEX = f"more than {VALUES} values and names, or {NESTED} lists and objects"
EARLIER = ("previous_response_id", "thread")  # name an answer that is as large as it was stored
_SHOWN = 200  # letters of a place in the body


class _NotFinite:
    """Stands for a number JSON does not have until its place is known."""


async def read_body(
    request: Request, settings: ServerSettings, pools: Pools, read: Callable[[dict[str, Any]], T]
) -> T:
    """What `read` makes of the request's JSON object, on any thread. RequestError 413 if it is too large, 408 if it
    comes too slowly, 400 for anything else."""
    try:
        async with asyncio.timeout(settings.body_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"The request body did not arrive within {settings.body_s:g} s."
        raise RequestError(message, code="request_timeout", status=408) from None
    if len(body) > SMALL:
        return await pools.body(lambda: read(parse_object(body)))
    value = parse_object(body)
    if any(value.get(name) for name in EARLIER):
        return await pools.answer(read, value)
    return read(value)


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            message = f"The request body is larger than {limit} bytes."
            raise RequestError(message, code="body_too_large", status=413)
        chunks.append(chunk)
    return b"".join(chunks)


def refuse_complex(texts: Sequence[bytes], what: str) -> None:
    """JSON that together would make so many objects that the interpreter is kept from all else: what counts is not
    the size but how many values there are outside of strings."""
    if sum(map(len, texts)) > SMALL:
        _refuse_many(map(_values, texts), what)


def refuse_complex_chat(messages: Sequence[Mapping[str, Any]], param: str) -> None:
    """A chat whose beginning is stored has the bounds of one that is sent whole."""
    sizes = [
        (len(level), sum(len(items) * (1 + isinstance(items, dict)) for items in level))
        for level in _levels(list(messages))
    ]
    _refuse_many(sizes, f"{param}: with what this request adds, the chat has", param)


def _refuse_many(sizes: Iterable[tuple[int, int]], what: str, param: str | None = None) -> None:
    nested, values = map(sum, zip(*sizes, strict=True))
    if nested > NESTED or values > VALUES:
        raise invalid(f"{what} {TOO_COMPLEX}.", param, "body_too_complex")


def _values(text: bytes) -> tuple[int, int]:
    """How many lists and objects there are, and how many values and names."""
    plain = text.replace(rb"\\", b"").replace(
        rb"\"", b""
    )  # every quote that is left begins or ends a string
    letters = np.frombuffer(plain, np.uint8)
    letters = letters[~np.logical_xor.accumulate(letters == ord('"'))]
    lists, objects, *between = (int(np.count_nonzero(letters == ord(mark))) for mark in "[{,:")
    return lists + objects, sum(between)


def parse_object(body: bytes) -> dict[str, Any]:
    """Clean plain data. RequestError unless it is one JSON object."""
    refuse_complex([body], "The request body has")
    odd: list[_NotFinite] = []

    def number(text: str) -> float | _NotFinite:
        value = float(text)
        if math.isfinite(value):
            return value
        odd.append(_NotFinite())
        return odd[-1]

    try:
        value = json.loads(body.decode("utf-8-sig"), parse_float=number, parse_constant=number)
        if odd or rb"\ud" in body or rb"\uD" in body:
            value = _scrub(value, "")
    except RequestError:
        raise
    except (ValueError, RecursionError):
        raise invalid("The request body is not valid JSON.", code="invalid_json") from None
    if not _shallow(value):
        raise invalid(
            f"The request body is nested deeper than {DEPTH} levels.", code="invalid_json"
        )
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_json")
    return value


def _shallow(value: Any) -> bool:
    """What is nested deeper would be too deep for one of those who read it later."""
    return not next(islice(_levels(value), DEPTH, None), [])


def _levels(value: Any) -> Iterator[list[Any]]:
    """Lists and objects, level by level."""
    level = [value] if isinstance(value, dict | list) else []
    while level:
        yield level
        inside = (v.values() if isinstance(v, dict) else v for v in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]


def _below(path: str, key: str) -> str:
    """Never longer than is shown of it: a path of megabytes, made anew for each item, would take hours."""
    return f"{path}.{key[:_SHOWN]}"[:_SHOWN] if path else key[:_SHOWN]


def _scrub(value: Any, path: str) -> Any:
    match value:
        case str():
            return _HALF.sub("\ufffd", value)
        case list():
            return [_scrub(item, f"{path}[{i}]") for i, item in enumerate(value)]
        case dict():
            clean = ((_HALF.sub("\ufffd", key), item) for key, item in value.items())
            return {key: _scrub(item, _below(path, key)) for key, item in clean}
        case _NotFinite():
            path = path[:_SHOWN] or "body"
            raise invalid(f"{path}: must be a finite number.", path, "invalid_type")
    return value
