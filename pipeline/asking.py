"""From a Python call's keywords to a Request: names and types are checked here, once."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

from pipeline.errors import RequestError, nearest
from pipeline.grammars import KINDS, make_grammar
from pipeline.types import Grammar, ReasoningBudget, Request, Sampling

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]

NO_ADAPTER = "none"
# of an adapter: no separator of a sum, no way to spell a path
ADAPTER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
ADAPTERS = 'an id of an adapter, several different ones ("a+b", ["a", "b"]), or "none"'

SAMPLING = frozenset(f.name for f in fields(Sampling))
FILLED = frozenset({"messages", "text", "token_ids", "sampling"})  # from the prompt, or one by one
NAMES = SAMPLING | {f.name for f in fields(Request)} - FILLED | {"raw"}


def make_request(prompt: Prompt, wanted: Mapping[str, Any], *, has_template: bool) -> Request:
    """`wanted` are fields of Request and of Sampling, None for "not said"; `raw=True` keeps a text
    from becoming a chat turn. RequestError names the field and what it wants."""
    said = {name: _checked(name, value) for name, value in wanted.items() if value is not None}
    raw = said.pop("raw", False)
    sampling = Sampling(**{name: said.pop(name) for name in list(said) if name in SAMPLING})
    filled = _prompt(prompt, chat=has_template and not raw)
    return Request(**{"id": uuid.uuid4().hex, **said, **filled}, sampling=sampling)


def _prompt(prompt: Prompt, *, chat: bool) -> dict[str, Any]:
    if isinstance(prompt, str):
        turn = {"role": "user", "content": prompt}
        return {"messages": (turn,)} if chat else {"text": prompt}
    if isinstance(prompt, Seq) and all(isinstance(item, Mapping) for item in prompt) and prompt:
        return {"messages": tuple(prompt)}
    if isinstance(prompt, Seq) and all(type(item) is int for item in prompt):
        return {"token_ids": tuple(prompt)}
    wants = "wants a text, a list of messages ({role, content}), or a list of token ids"
    raise RequestError(f"prompt: {wants}, got {type(prompt).__name__}", param="prompt")


def _checked(name: str, value: Any) -> Any:
    if name not in NAMES:
        hint = nearest(name, NAMES) or f"Fields: {', '.join(sorted(NAMES))}."
        raise RequestError(f"{name}: no such field. {hint}", param=name)
    check, wants = CHECKS[name]
    try:
        return check(value)
    except (TypeError, ValueError):
        raise RequestError(f"{name}: wants {wants}, got {value!r}", param=name) from None


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return check


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _stops(value: str | Iterable[str]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise TypeError
    return stops


def _bias(
    value: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple((int(token), _number(bias)) for token, bias in pairs)


def _grammar(value: Grammar | Mapping[str, Any]) -> Grammar:
    if isinstance(value, Grammar):
        return value
    ((kind, source),) = value.items()
    return make_grammar(kind, source, "grammar")


def adapter_ids(value: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """ "a", "a+b", "a,b" or ["a", "b"]: their sum, in this order; "none", "" and []: no adapter. Which
    are mounted is not known here. ValueError for what can be no id."""
    listed = re.split("[+,]", value) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise TypeError
    ids = tuple(listed)
    if ids in ((), ("",), (NO_ADAPTER,)):
        return ()
    if NO_ADAPTER in ids or len(set(ids)) < len(ids) or not all(map(ADAPTER_ID.fullmatch, ids)):
        raise ValueError(f"must be {ADAPTERS}")
    return ids


def _mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()}


def _budget(value: ReasoningBudget | int) -> ReasoningBudget:
    return value if isinstance(value, ReasoningBudget) else ReasoningBudget(_exactly(int)(value))


WHOLE = (_exactly(int), "a whole number")
NUMBER = (_number, "a number")
TEXT = (_exactly(str), "a text")
TRUTH = (_exactly(bool), "True or False")
CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    **dict.fromkeys(
        ("max_tokens", "logprobs", "prompt_logprobs", "prefill_chunk", "priority"), WHOLE
    ),
    **dict.fromkeys(("top_k", "seed", "drawn_seed"), WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), NUMBER),
    **dict.fromkeys(("id", "client", "session_id", "group"), TEXT),
    **dict.fromkeys(("ignore_eos", "raw", "marks", "origins"), TRUTH),
    "stop": (_stops, "a text or a list of texts, none of them empty"),
    "logit_bias": (_bias, "a mapping of token ids to numbers"),
    "grammar": (_grammar, f"one of {', '.join(KINDS)} and its source: {{'regex': '[0-9]+'}}"),
    "adapter": (adapter_ids, ADAPTERS),
    "reasoning_budget": (_budget, "a whole number"),
    "template_args": (_mapping, "a mapping"),
}
