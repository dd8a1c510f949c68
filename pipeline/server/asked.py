"""From a checked body to engine requests: what one HTTP request asks for, endpoint by endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from pipeline.server.errors import invalid
from pipeline.server.grammars import wanted_grammar
from pipeline.server.neutral import check_neutral
from pipeline.server.schema import ChatBody, Common, Message, TextBody, TextPart, read
from pipeline.types import Request, Sampling


@dataclass(frozen=True)
class Asked:
    """One HTTP request. `requests[i]` is choice i; each prompt's n choices stand together."""

    id: str
    requests: tuple[Request, ...]
    n: int
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]  # unknown parameters, for the Warning header


@dataclass(frozen=True)
class Bounds:
    """What the loaded model and the settings allow."""

    vocab_size: int
    max_choices: int
    max_open: int  # requests that run and wait: more choices would be refused for ever
    client: str  # who asks, if the body does not say
    priorities: bool  # whether a request's priority changes anything


def chat(value: Mapping[str, Any], bounds: Bounds) -> Asked:
    """RequestError for anything that is wrong or not honoured."""
    body = read(ChatBody, value)
    messages, ignored = _messages(body.messages)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs to be true.", "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    base = replace(
        _request(body, f"chatcmpl-{uuid4().hex}", bounds),
        messages=messages,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        template_args=body.chat_template_kwargs,
    )
    return _asked(body, [base], bounds, ignored)


def text(value: Mapping[str, Any], bounds: Bounds) -> Asked:
    """RequestError for anything that is wrong or not honoured."""
    body = read(TextBody, value)
    base = replace(
        _request(body, f"cmpl-{uuid4().hex}", bounds),
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
    )
    return _asked(body, [_prompt(base, prompt, bounds) for prompt in body.prompt], bounds, [])


def _request(body: Common, name: str, bounds: Bounds) -> Request:
    return Request(
        id=name,
        sampling=_sampling(body, bounds),
        stop=tuple(body.stop),
        grammar=wanted_grammar(body),
        ignore_eos=bool(body.ignore_eos),
        prefill_chunk=body.prefill_chunk,
        client=body.user or bounds.client,
        priority=body.priority or 0,
        prompt_logprobs=body.prompt_logprobs,
        session_id=body.session_id,
    )


def _sampling(body: Common, bounds: Bounds) -> Sampling:
    if any(token >= bounds.vocab_size for token, _ in body.logit_bias or ()):
        message = f"logit_bias: a token id is not below the vocabulary's {bounds.vocab_size}."
        raise invalid(message, "logit_bias")
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
    )


def _prompt(base: Request, prompt: str | list[int], bounds: Bounds) -> Request:
    if isinstance(prompt, str):
        return replace(base, text=prompt)
    if not all(0 <= token < bounds.vocab_size for token in prompt):
        raise invalid(f"prompt: a token id is not in 0..{bounds.vocab_size - 1}.", "prompt")
    return replace(base, token_ids=tuple(prompt))


def _asked(body: Common, prompts: list[Request], bounds: Bounds, ignored: Iterable[str]) -> Asked:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only allowed when stream is true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs: not available when stream is true.", "prompt_logprobs")
    n = body.n or 1
    _check_choices(n * len(prompts), "n" if n > 1 else "prompt", bounds)
    return Asked(
        id=prompts[0].id,
        requests=tuple(_numbered(prompts, n)),
        n=n,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=(
            *check_neutral(body.model_extra or {}),
            *ignored,
            *_odd_options(body),
            *(["priority"] if body.priority and not bounds.priorities else []),
        ),
    )


def _check_choices(count: int, name: str, bounds: Bounds) -> None:
    most, why = min(
        (bounds.max_choices, "server.max_choices"),
        (bounds.max_open, "limits.max_rows and limits.max_queue together"),
    )
    if count > most:
        raise invalid(f"{name}: more than {most} choices in one request ({why}).", name)


def _odd_options(body: Common) -> list[str]:
    options = body.stream_options
    return [f"stream_options.{name}" for name in (options and options.model_extra) or ()]


def _numbered(prompts: list[Request], n: int) -> Iterable[Request]:
    """Choice c of a prompt draws with seed + c, so that n choices differ and can be had again. The
    prompt is scored once, with its first choice."""
    if len(prompts) * n == 1:
        yield prompts[0]
        return
    for index in range(len(prompts) * n):
        base = prompts[index // n]
        seed = base.sampling.seed
        if seed is not None:
            seed = (seed + index % n) % 2**63
        base = replace(base, id=f"{base.id}-{index}", sampling=replace(base.sampling, seed=seed))
        yield replace(base, prompt_logprobs=None) if index % n else base


def _messages(messages: list[Message]) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    plain, ignored = [], []
    for i, message in enumerate(messages):
        plain.append(_message(message, f"messages[{i}]"))
        ignored += [f"messages[{i}].{name}" for name in message.model_extra or {}]
    return tuple(plain), ignored


def _message(message: Message, where: str) -> dict[str, Any]:
    """The message as templates read it: text joined, `developer` is called system, nothing null."""
    data = message.model_dump(exclude_none=True, include=set(Message.model_fields))
    content = message.content
    if isinstance(content, list) and content:
        content = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and message.role == "assistant" and message.tool_calls:
        content = ""
    if not isinstance(content, str):
        message_text = f"{where}.content: must be a string or a list of text parts."
        raise invalid(message_text, f"{where}.content", "invalid_type")
    role = "system" if message.role == "developer" else message.role
    return {**data, "role": role, "content": content}


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        message = f"{where}.type: only text parts are supported."
        raise invalid(message, f"{where}.type", "unsupported_value")
    return read(TextPart, part, where).text
