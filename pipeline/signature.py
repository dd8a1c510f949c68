"""The constructor is the schema: what a class takes, and whether a value from YAML fits.

Positional parameters are parts, keyword-only ones are settings. A value may come with the text it
was typed as (command line, environment): settings that are text take that text byte for byte, so
that `0123`, `on` and `1e3` stay what was typed; others read numbers and truth values from it.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

import pipeline.types

MISSING: Any = inspect.Parameter.empty
WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
TRUTH = {"true": True, "yes": True, "on": True, "1": True}
TRUTH |= {"false": False, "no": False, "off": False, "0": False}


class MisfitError(ValueError):
    """A value does not fit its annotation; the message says what is wanted."""


@dataclass(frozen=True)
class Setting:
    """One keyword-only parameter."""

    annotation: Any
    default: Any = MISSING


@dataclass(frozen=True)
class Signature:
    """What a constructor takes: parts by annotated type, in order; settings by name."""

    parts: Mapping[str, Any]
    settings: Mapping[str, Setting]


def signature(target: Any) -> Signature:
    """Read a class's constructor. `*` and `**` hand on what the base class takes beside it."""
    parameters = inspect.signature(target).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parts = {p.name: _resolved(p.annotation, target) for p in parameters if p.kind in positional}
    settings = {
        p.name: Setting(_resolved(p.annotation, target), p.default)
        for p in parameters
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    kinds = {p.kind for p in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        parts |= signature(target.__base__).parts
    if inspect.Parameter.VAR_KEYWORD in kinds:
        settings |= signature(target.__base__).settings
    return Signature(parts, settings)


def _resolved(annotation: Any, target: Any) -> Any:
    """The annotation as an object; names imported for type checkers only still resolve."""
    if not isinstance(annotation, str):
        return Any if annotation is MISSING else annotation
    module = inspect.getmodule(target)
    names = {**vars(typing), **vars(collections.abc), "Seq": Sequence, "Path": Path}
    names |= vars(pipeline.types) | (vars(module) if module else {})
    return eval(annotation, names)


def wanted(annotation: Any) -> str:
    """The annotation in words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if annotation is None or annotation is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(wanted(arg) for arg in args)
    if _is_list(annotation):
        return f"a list of {wanted(args[0])}" if args and args[0] is not Any else "a list"
    if _is_mapping(annotation):
        return "settings by name"
    return getattr(annotation, "__name__", str(annotation))


def fit(value: Any, annotation: Any, text: str | None = None) -> Any:
    """The value as the annotation wants it, or MisfitError. `text` is what was typed, if it was."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, args, text)
    if annotation is None or annotation is type(None):
        return _fit_none(value, text)
    if origin is Literal:
        return _fit_literal(value, args, text)
    if _is_list(annotation):
        return _fit_list(value, annotation, text)
    if _is_mapping(annotation):
        return _fit_mapping(value, args, text)
    return _fit_plain(value, annotation, text)


def _misfit(value: Any, annotation: Any) -> MisfitError:
    shown = (
        {None: "null", True: "true", False: "false"}.get(value, repr(value))
        if _simple(value)
        else repr(value)
    )
    hint = ""
    if annotation is str or str in get_args(annotation):
        hint = f" Put it in quotes to make it text: '{shown}'."
    return MisfitError(f"wants {wanted(annotation)}, got {shown}.{hint}")


def _simple(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _fit_plain(value: Any, annotation: Any, text: str | None) -> Any:
    if annotation is str or annotation is Path:
        value = text if text is not None else value
        if isinstance(value, str):
            return annotation(value)
        raise _misfit(value, annotation)
    if text is not None and isinstance(value, str):
        value = _literal(text, annotation)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation is float and isinstance(value, float) and math.isnan(value):
        raise _misfit(value, annotation)
    if isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool)):
        return value
    raise _misfit(value, annotation)


def _literal(text: str, annotation: Any) -> Any:
    """Text of a number or truth value as such; the text itself where it is none."""
    try:
        return TRUTH[text.strip().lower()] if annotation is bool else annotation(text)
    except (KeyError, ValueError, TypeError):
        return text


def _fit_none(value: Any, text: str | None) -> None:
    if value is None or (text is not None and text.strip() in ("null", "None")):
        return
    raise _misfit(value, None)


def _fit_union(value: Any, args: tuple[Any, ...], text: str | None) -> Any:
    """The first member that fits; text last, since with typed text it always would."""
    for arg in sorted(args, key=lambda arg: arg in (str, Path)):
        try:
            return fit(value, arg, text)
        except MisfitError:
            continue
    raise _misfit(value, typing.Union[args])  # noqa: UP007


def _fit_literal(value: Any, args: tuple[Any, ...], text: str | None) -> Any:
    for choice in args:
        if type(value) is type(choice) and value == choice:
            return choice
        if text is not None and text == str(choice):
            return choice
    raise _misfit(value, Literal[args])


def _is_list(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return origin in (list, tuple, set, frozenset, Sequence, collections.abc.Collection)


def _is_mapping(annotation: Any) -> bool:
    return (get_origin(annotation) or annotation) in (dict, Mapping)


def _fit_list(value: Any, annotation: Any, text: str | None) -> Any:
    """A YAML list as list, tuple or frozenset; fixed-length tuples check their length."""
    if isinstance(value, str) and text is not None:
        value = _yaml(text)
    if not isinstance(value, list | tuple):
        raise _misfit(value, annotation)
    args = get_args(annotation)
    fixed = get_origin(annotation) is tuple and args and args[-1] is not Ellipsis
    if fixed and len(args) != len(value):
        raise MisfitError(f"wants {len(args)} values, got {len(value)}.")
    kinds = args if fixed else (args[:1] or (Any,)) * len(value)
    items = [
        _fit_item(i, item, kind) for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
    ]
    container = get_origin(annotation) or annotation
    return container(items) if container in (list, set, frozenset) else tuple(items)


def _fit_item(index: Any, item: Any, kind: Any) -> Any:
    try:
        return fit(item, kind)
    except MisfitError as error:
        raise MisfitError(f"item {index} {error}") from None


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _fit_mapping(value: Any, args: tuple[Any, ...], text: str | None) -> Any:
    if isinstance(value, str) and text is not None:
        value = _yaml(text)
    if not isinstance(value, Mapping):
        raise _misfit(value, dict)
    name, kind = args if len(args) == 2 else (Any, Any)
    return {
        fit(key, name, str(key)): _fit_item(repr(key), item, kind) for key, item in value.items()
    }
