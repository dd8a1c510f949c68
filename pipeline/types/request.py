"""What comes in and what goes out: plain data, safe on any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
OriginKind = Literal["accepted", "correction", "bonus", "plain", "resumed"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `None` means "not said": the next in line decides
    (request, then recipe, then the model's generation_config, then neutral)."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # (0, 1]; 1 is off
    top_k: int | None = None  # 0 is off
    min_p: float | None = None  # [0, 1]; 0 is off
    repetition_penalty: float | None = None  # 1 is off
    presence_penalty: float | None = None  # 0 is off
    frequency_penalty: float | None = None  # 0 is off
    logit_bias: tuple[tuple[int, float], ...] | None = None
    seed: int | None = None

    def over(self, lower: Sampling) -> Sampling:
        """These settings where they are said, else those of `lower`."""
        said = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(lower, **said)


@dataclass(frozen=True)
class Grammar:
    """The form an answer must have. `field` is what the request called it, for its error."""

    kind: Literal["json_schema", "regex", "choice", "lark", "gbnf", "tools"]
    # JSON text of the schema, of the list of choices, or of what `Dialect.grammar` takes; the expression, the grammar
    source: str
    field: str = "grammar"
    compact: bool = False  # JSON without white space between its tokens


@dataclass(frozen=True)
class ReasoningBudget:
    """After so many tokens of reasoning its end mark is all that may come. `field` is what the request
    called it, for its error."""

    tokens: int
    field: str = "reasoning_budget"


NEUTRAL = Sampling(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, (), None)


@dataclass(frozen=True)
class Request:
    """What a user asked. Exactly one of `messages`, `text`, `token_ids` is set."""

    id: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None  # a ceiling; None: until EOS or the context ends
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # None: off; n: the chosen token and the n best
    grammar: Grammar | None = None
    reasoning_budget: ReasoningBudget | None = None  # None: as many as it takes
    prompt_logprobs: int | None = None  # None: off; n: every prompt token and the n best
    origins: bool = False  # say of each token where it came from
    ignore_eos: bool = False  # go on after EOS (benchmarks)
    prefill_chunk: int | None = None  # tokens
    marks: bool = False  # text of special tokens around reasoning and tool calls is delivered too
    group: str | None = None  # choices of one prompt, which they prefill once
    template_args: Mapping[str, Any] = field(default_factory=dict)
    client: str = ""  # fairness key; never part of a namespace
    weight: float = 1.0  # of the client: its share, where the scheduler's own settings do not say
    priority: int = 0  # higher is sooner
    # ids of the adapters whose sum the answer is to come from; (): none; None: the recipe's default
    adapter: tuple[str, ...] | None = None
    session_id: str | None = None  # affinity only; never part of a namespace
    drawn_seed: int | None = (
        None  # drawn for it by an engine that is gone: it is that answer which goes on
    )


@dataclass(frozen=True)
class TokenLogprob:
    """One emitted token's log-probability, after penalties and bias, before temperature and
    filters. `top` holds the best alternatives, sorted, the chosen one included only by rank."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a delivered token came from. "accepted": it was drafted and the target agreed; "correction":
    the target's own in place of a draft; "bonus": the one more that a window agreed to throughout gives;
    "plain": nothing was drafted there; "resumed": an earlier attempt at this answer had drawn it."""

    kind: OriginKind
    constrained: bool = False  # the constraint forbids what the model itself liked best there
    rejected: tuple[int, ...] = ()  # of a correction: the drafted ids that were given up for it


@dataclass(frozen=True)
class Comparison:
    """A prompt token's position under a stored reference of the same model and text."""

    kl: float  # nats: how far the reference's distribution is from this one
    logprob: float  # of the prompt's token, by the reference
    agrees: bool  # both hold the same token for the best


@dataclass(frozen=True)
class PromptLogprob:
    """One prompt token's log-probability given those before it, by the model's own scores: no penalty,
    bias, temperature or filter. `rank` 1 is the best; `top` as in `TokenLogprob`."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    against: Comparison | None = None  # where the flow compares


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `completion_tokens` counts EOS once and never a discarded token;
    `resumed_tokens` of them were drawn by an attempt before a crash or a disconnect. The prompt's first
    `agreed_tokens` are those of some saved state: it first differs from it at this index."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    resumed_tokens: int = 0
    agreed_tokens: int = 0


@dataclass(frozen=True)
class Speculation:
    """How drafting went. `by_position[i]` counts proposals of at least i+1 tokens."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    target_calls: int = 0  # forwards of the target this request took part in, prefill included


@dataclass(frozen=True)
class Delta:
    """Newly delivered output. `text` never splits a character and never holds a stop string."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: tuple[Origin, ...] = ()  # one a token where the request wants them
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()  # with the first; as in `Done`


@dataclass(frozen=True)
class Accepted:
    """The request passed admission; it has this many prompt tokens."""

    prompt_tokens: int
    thinking: bool = False  # the prompt leaves the answer in the middle of reasoning
    seed: int | None = None  # asked for, or drawn


@dataclass(frozen=True)
class Done:
    """The request's last event when all went well."""

    finish_reason: FinishReason
    usage: Usage
    seed: int
    timings: Mapping[str, float]  # seconds by stage, and `ttft`, `queue`, `total`
    speculation: Speculation
    # where they were asked for: one entry a prompt token, None for the first, which follows nothing
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()
    stop_string: str | None = None  # which of the request's ended it


@dataclass(frozen=True)
class Failed:
    """The request's last event when it did not end well. `error` is of our family or a fault."""

    error: Exception


Event = Accepted | Delta | Done | Failed
