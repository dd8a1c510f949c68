"""Turn a request into ids, and settle everything that is the request's alone."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

from pipeline.errors import RequestError
from pipeline.identity import digest
from pipeline.types import (
    NEUTRAL,
    Adapters,
    Batch,
    Constraint,
    KVPolicy,
    Limits,
    Request,
    Sampler,
    Sequence,
    Target,
)


class Tokenize:
    """Runs on the preparation pool before admission is answered: no device arrays in here."""

    reads = frozenset({"request"})
    writes = frozenset(
        {
            "prompt_ids",
            "boundary",
            "thinking",
            "namespace",
            "sampling",
            "seed",
            "max_new",
            "sampler",
        }
    )
    needs: dict[str, frozenset[str]] = {}
    thread = "prepare"

    def __init__(
        self,
        target: Target,
        kv: KVPolicy,
        sampler: Sampler,
        constraint: Constraint,
        limits: Limits,
        adapters: Adapters,
    ):
        self.target, self.kv, self.sampler, self.constraint = target, kv, sampler, constraint
        self.limits, self.adapters = limits, adapters

    def run(self, batch: Batch) -> None:
        for sequence in batch.sequences:
            self._bind(sequence)

    def _bind(self, sequence: Sequence) -> None:
        request = sequence.request
        self._check_numbers(request)
        self.adapters.check(request)
        sequence.prompt_ids = self._ids(request)
        sequence.max_new = self._room(request, len(sequence.prompt_ids))
        sequence.boundary = self._boundary(request, sequence.prompt_ids)
        sequence.thinking = self._thinking(request, sequence)
        sequence.namespace = digest(self._namespace())
        lower = self.sampler.defaults.over(self.target.generation).over(NEUTRAL)
        sequence.sampling = request.sampling.over(lower)
        self._check_bias(sequence.sampling.logit_bias or ())
        sequence.seed = self._seed(request, sequence.sampling.seed)
        matcher = self.constraint.bind(request, self.target, sequence.thinking)
        sequence.sampler = self.sampler.bind(
            sequence.sampling, sequence.seed, sequence.prompt_ids, request.logprobs, matcher
        )

    def _seed(self, request: Request, asked: int | None) -> int:
        given = request.drawn_seed if asked is None else asked
        return secrets.randbits(63) if given is None else given

    def _ids(self, request: Request) -> list[int]:
        tokenizer = self.target.tokenizer
        if request.messages is not None:
            ids = tokenizer.render(request.messages, request.template_args)
        elif request.text is not None:
            ids = tokenizer.encode(request.text)
        else:
            ids = list(request.token_ids or ())
        if not ids:
            raise RequestError("the prompt has no tokens: give at least one", param=_field(request))
        wrong = [i for i in ids if not 0 <= i < self.target.vocab_size]
        if wrong:
            raise RequestError(
                f"token id {wrong[0]} is not in the vocabulary (0..{self.target.vocab_size - 1})",
                param=_field(request),
            )
        return ids

    def _check_numbers(self, request: Request) -> None:
        """What HTTP refuses before it gets here, and Python callers may get wrong."""
        least = {"max_tokens": 0, "prefill_chunk": 1, "logprobs": 0, "prompt_logprobs": 0}
        for name, low in least.items():
            value = getattr(request, name)
            if value is not None and (type(value) is not int or value < low):
                raise RequestError(f"{name}: wants a whole number of at least {low}", param=name)
        budget = request.reasoning_budget
        if budget is not None and budget.tokens < 0:
            message = f"{budget.field}: wants a whole number of at least 0"
            raise RequestError(message, param=budget.field)
        seed = request.sampling.seed
        if seed is not None and type(seed) is not int:
            raise RequestError("seed: wants a whole number", param="seed")

    def _check_bias(self, logit_bias: Iterable[tuple[int, float]]) -> None:
        wrong = [i for i, _ in logit_bias if not 0 <= i < self.target.vocab_size]
        if wrong:
            raise RequestError(
                f"logit_bias: token id {wrong[0]} is not in the vocabulary "
                f"(0..{self.target.vocab_size - 1})",
                param="logit_bias",
            )

    def _boundary(self, request: Request, prompt_ids: list[int]) -> int:
        """Tokens the next turn will repeat: a chat without the reply's header, which templates
        rewrite once the turn is history; for plain text all but the last token."""
        if request.messages is None:
            return len(prompt_ids) - 1
        try:
            history = self.target.tokenizer.render(
                request.messages, request.template_args, reply=False
            )
        except RequestError:
            return 0
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(history, prompt_ids, strict=False))
        return min(sum(1 for _ in shared), len(prompt_ids) - 1)

    def _thinking(self, request: Request, sequence: Sequence) -> bool:
        """Whether the prompt opens a reasoning section. In a chat only the reply's header can: what
        users write of it does not count."""
        if not (request.marks or request.grammar or request.reasoning_budget):
            return False
        header = sequence.boundary if request.messages is not None else 0
        return self.target.tokenizer.dialect.opened(sequence.prompt_ids[header:])

    def _room(self, request: Request, prompt_len: int) -> int:
        """Ceiling on emitted tokens; with it no position at or past the context is ever run."""
        context = min(self.target.context_len, self.limits.context or self.target.context_len)
        ceilings = [context - prompt_len, request.max_tokens, self.limits.max_tokens]
        max_new = min(c for c in ceilings if c is not None)
        self.limits.admit(prompt_len, max_new, self.target, self.kv, param=_field(request))
        return max_new

    def _namespace(self) -> Mapping[str, Any]:
        """Of the base model; `adapt` adds what the row wears once that is settled."""
        return {
            "artifact": self.target.artifact,
            "tokenizer": self.target.tokenizer.identity,
            "dtype": self.target.dtype,
            "layers": [spec.signature for spec in self.target.specs],
            "kv": dict(self.kv.identity),
            "format": 1,
        }


def _field(request: Request) -> str:
    """The request's field that holds the prompt."""
    return "messages" if request.messages is not None else "prompt"
