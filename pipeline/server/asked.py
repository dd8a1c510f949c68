"""From a checked body to engine requests: what one HTTP request asks for, whatever its family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.server.caller import Caller
from pipeline.server.errors import invalid
from pipeline.server.grammars import wanted_grammar
from pipeline.server.models import adapted
from pipeline.server.neutral import check_neutral
from pipeline.server.schema import Body, Common
from pipeline.server.tools import Toolbox
from pipeline.types import Dialect, Request, Sampling


@dataclass(frozen=True)
class Asked:
    """One HTTP request. `requests[i]` is choice i; each prompt's n choices stand together."""

    id: str
    requests: tuple[Request, ...]
    body: Body  # in its family's words
    n: int = 1
    stream: bool = False
    ignored: tuple[str, ...] = ()  # parameters without effect, for the Warning header
    tools: Toolbox | None = None
    owner: str = ""  # whose key it was asked with


@dataclass(frozen=True)
class Bounds:
    """What the loaded model and the settings allow."""

    vocab_size: int
    max_choices: int
    max_open: int  # requests that run and wait: more choices would be refused for ever
    caller: Caller
    priorities: bool  # whether a request's priority changes anything
    model: str  # as it is served
    adapters: Sequence[str]  # mounted: /v1/models lists each as one more model
    dialect: Dialect = field(repr=False)


def base_request(body: Common, name: str, bounds: Bounds) -> Request:
    """What both of OpenAI's completion endpoints say alike."""
    return Request(
        id=name,
        sampling=_sampling(body, bounds),
        stop=tuple(body.stop),
        grammar=wanted_grammar(body),
        ignore_eos=bool(body.ignore_eos),
        prefill_chunk=body.prefill_chunk,
        prompt_logprobs=body.prompt_logprobs,
        adapter=wanted_adapter(body.adapter, body.model, bounds),
        origins=bool(body.token_origins),
        **bounds.caller.asks(body.user, body.priority, body.session_id),
    )


def wanted_adapter(
    adapter: tuple[str, ...] | None, model: str | None, bounds: Bounds
) -> tuple[str, ...] | None:
    """What the body names, else what its model's name stands for; None: neither says anything. RequestError
    for a name whose adapter is gone: the model without it would be another one than was asked for."""
    own, model = adapted(bounds.model, ""), model or ""
    if adapter is not None or not bounds.adapters or not model.startswith(own):
        return adapter
    if (named := model.removeprefix(own)) not in bounds.adapters:
        what = "no such adapter is mounted; GET /v1/models lists those that are."
        raise invalid(f"model: {what}", "model", "adapter_not_found")
    return (named,)


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


def asked(
    body: Common,
    prompts: Sequence[Request],
    bounds: Bounds,
    *,
    ignored: Iterable[str] = (),
    tools: Toolbox | None = None,
) -> Asked:
    """All choices of all prompts. RequestError for parameters that exclude each other."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: only allowed when stream is true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs: not available when stream is true.", "prompt_logprobs")
    n = body.n or 1
    _check_choices(n * len(prompts), "n" if n > 1 else "prompt", bounds)
    return Asked(
        id=prompts[0].id,
        requests=tuple(_numbered(prompts, n)),
        body=body,
        n=n,
        stream=bool(body.stream),
        tools=tools,
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


def _numbered(prompts: Sequence[Request], n: int) -> Iterable[Request]:
    """Choice c of a prompt draws with seed + c, so that n choices differ and can be had again. The
    prompt is prefilled once for all of them, and scored with its first."""
    if len(prompts) * n == 1:
        yield prompts[0]
        return
    for index in range(len(prompts) * n):
        base = prompts[index // n]
        seed = base.sampling.seed
        if seed is not None:
            seed = (seed + index % n) % 2**63
        group = f"{base.id}-{index // n}" if n > 1 else None
        sampling = replace(base.sampling, seed=seed)
        base = replace(base, id=f"{base.id}-{index}", sampling=sampling, group=group)
        yield replace(base, prompt_logprobs=None) if index % n else base


def include_usage(asked: Asked) -> bool:
    options: Any = getattr(asked.body, "stream_options", None)
    return bool(options and options.include_usage)
