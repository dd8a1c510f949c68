"""One request in flight, the batch it runs in, and the saved state it may leave.

The fields of `Sequence` are the vocabulary of the pipeline: a stage's `reads` and `writes` name
them, `check` proves their order, and `graph` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.types.request import (
    Event,
    FinishReason,
    Origin,
    PromptLogprob,
    Request,
    Sampling,
    TokenLogprob,
)

if TYPE_CHECKING:
    from pipeline.types.guarded import GuardedRows
    from pipeline.types.keeping import Fetch, Match
    from pipeline.types.parts import Round, Rows, RowSampler


@dataclass(frozen=True)
class Emitted:
    """A token the target agreed to, with its log-probability and its origin where the request wants
    them."""

    token_id: int
    logprob: TokenLogprob | None = None
    origin: Origin | None = None


class Proposal(list[int]):
    """Proposed ids. A drafter that knows more about them says it here; a plain list of ids says nothing.

    `confidence[i]` is the drafter's own probability of its best token at i, given the ids before it;
    it must not depend on which id was drawn there, so that cutting by it keeps every rule exact.
    `scores[i]` are the logits_V (host) from which id i was drawn by the row's own sampler; None, or no
    scores at all: it was not drawn but chosen, so that rule `residual` takes it for certain.
    """

    def __init__(
        self, ids: Iterable[int] = (), confidence: Seq[float] = (), scores: Seq[Any] = ()
    ) -> None:
        super().__init__(ids)
        self.confidence, self.scores = list(confidence), list(scores)

    @property
    def drawn(self) -> bool:
        """Whether any id was."""
        return any(scores_V is not None for scores_V in self.scores)

    def cut(self, length: int) -> Proposal:
        """The first `length` ids with what is known of them."""
        return Proposal(self[:length], self.confidence[:length], self.scores[:length])


class Owner(NamedTuple):
    """Whose a row is, to a drafter."""

    memory: str = ""  # where it keeps the row's answer, and looks for earlier ones
    adapted: bool = False  # it wears adapters: what others have learned is the base model


@dataclass
class Sequence:
    """One request in flight. Only stages write fields below `# stages`; the engine owns the rest."""

    request: Request
    deliver: Callable[[Event], None]  # thread-safe, never blocks

    # stages
    prompt_ids: list[int] = field(default_factory=list)
    boundary: int = 0  # tokens of the prompt that the next turn will repeat (stable template part)
    namespace: str = ""  # of the base model, and from the row's start of what it wears too
    adapters: tuple[str, ...] | None = None  # what the row wears; None before its start
    owner: Owner = field(default_factory=Owner)  # settled with what it wears
    sampling: Sampling = field(default_factory=Sampling)  # resolved, nothing None but seed
    seed: int = 0  # the request's, or chosen by the server
    max_new: int = 0  # ceiling on emitted tokens, clamped to the context
    sampler: RowSampler | None = None
    text_state: Any = None  # detokenize's own incremental decoder
    match: Match | None = None  # the saved state to start from, until it is materialized
    restore: Fetch | None = None  # a look-up under way; the row waits for it
    cached_len: int = 0  # prompt tokens served from saved state
    agreed_len: int = 0  # leading prompt tokens that some saved state has
    processed_ids: list[int] = field(default_factory=list)  # exactly what the target rows hold
    snapshot_len: int = 0  # next length whose state is to be published during prefill; 0: none
    captured_len: int = 0  # longest length already published
    thinking: bool = False  # the prompt ends inside a reasoning section
    progress: Any = None  # what is kept of the answer under way (stages.progress); None: nothing is
    resumed_len: int = 0  # emitted tokens that an earlier attempt had drawn
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # of prompt_ids[1:]
    prompt_hidden: Any = None  # hidden_WD of the chunk just run, where its tokens are scored
    score_state: Any = None  # score's own: the stored reference and what is being recorded
    pending: int = -1  # next input token: known, not yet in the rows
    depth: int = 0  # speculation length allowed this round
    proposal: Proposal = field(default_factory=Proposal)
    scores: Any = None  # logits_LV of this row's window, on the device or the host
    accepted: int = 0  # leading proposal tokens the target agreed to
    emitted: list[Emitted] = field(default_factory=list)  # accepted tokens, then the new pending
    kept: int = 0  # window inputs that stay in the rows: 1 + delivered drafts, or 0
    output_ids: list[int] = field(default_factory=list)  # every delivered token, EOS included
    finish_reason: FinishReason | None = None
    stop_string: str | None = None  # of the request, where it ended the row

    # engine
    cancelled: bool = False
    error: Exception | None = None
    ready: bool = False  # prefill is complete
    submitted: float = 0.0  # perf_counter seconds
    timings: dict[str, float] = field(default_factory=dict)
    entered: dict[str, float] = field(default_factory=dict)  # the batch's clock when it joined
    counts: dict[str, int] = field(default_factory=dict)
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def drop_match(self) -> None:
        """Give a borrowed state back, if there is one or is to be one."""
        for held in (self.match, self.restore):
            if held is not None:
                held.release()
        self.match = self.restore = None

    @property
    def live(self) -> bool:
        """Still producing tokens."""
        return self.finish_reason is None and self.error is None and not self.cancelled

    @property
    def scored_prompt(self) -> tuple[PromptLogprob | None, ...]:
        """One entry a prompt token where they were asked for, None for the first, which follows nothing."""
        if self.request.prompt_logprobs is None or self.cancelled:
            return ()
        return (None, *self.prompt_logprobs)

    @property
    def position(self) -> int:
        """Absolute position of the next token to be emitted; keys the noise of its draw."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass
class Batch:
    """The rows of one step. `sequences[i]` owns row i of `rows` and of `draft_rows`.

    Only the engine changes membership, and only while `round` is None.
    """

    sequences: list[Sequence]
    rows: Rows
    draft_rows: GuardedRows
    round: Round | None = None
    ahead: tuple[Round, Any, Any] | None = (
        None  # the next plain round, scores and taps, not launched
    )
    allowance: int | None = (
        None  # prompt tokens this step may still take over all rows; None: no bound
    )
    draft_hidden: Any = None  # what the drafter's taps saw this round; None without taps
    clock: dict[str, float] = field(default_factory=dict)  # seconds by stage, of this batch

    def drop_ahead(self) -> None:
        """Forget the round built ahead; the rows are as if it had not been begun."""
        if self.ahead is not None:
            self.ahead[0].abandon()
            self.ahead = None


@dataclass(frozen=True)
class LayerSpec:
    """What decides how a layer's rows are stored, cut and joined."""

    kind: str  # full | sliding | chunked | sinks | latent | recurrent
    window: int = (
        0  # sliding, sinks: a query sees itself and window - 1 before it; chunked: its size
    )
    signature: str = ""  # heads, sizes, dtype: two states join only if equal
    group: int = -1  # composite: specs of one model layer that keeps several states share a number
    keep: int = 0  # sinks only: first tokens that every query sees, beside its window

    @property
    def codable(self) -> bool:
        """Whether a policy may store its keys and values in another way: as codes, or in blocks. Latents
        are small already, recurrent state is no list of tokens, other windows nobody has written."""
        return self.kind in ("full", "sliding")


@dataclass(frozen=True)
class LayerSlice:
    """One layer's arrays for tokens [first, stop of the segment): name -> array (heads, tokens, dim),
    evaluated and compact. `first` is later than the segment's start where a window has passed."""

    first: int
    arrays: Mapping[str, Any]


@dataclass(frozen=True)
class Segment:
    """Tokens [start, stop) in every layer that can be cut by tokens. Immutable; shared by states."""

    start: int
    stop: int
    layers: tuple[LayerSlice | None, ...]  # None: this layer cannot be cut, see State.boundaries


@dataclass(frozen=True)
class Attachment:
    """A drafter's companion state at the state's exact length. Never cut."""

    namespace: str
    schema: str
    metadata: Mapping[str, str | int | float | bool]
    tensors: tuple[Any, ...] = ()


@dataclass(frozen=True)
class State:
    """Everything needed to go on after `tokens` without running the target over them again.

    Invariant: len(tokens) == last segment's stop == every boundary payload's own length.
    Immutable and materialized: no array in it is lazy or a view that pins a batch.
    """

    tokens: tuple[int, ...]
    namespace: str
    specs: tuple[LayerSpec, ...]
    segments: tuple[Segment, ...]  # contiguous from 0
    boundaries: Mapping[int, Mapping[int, Any]] = field(
        default_factory=dict
    )  # length -> layer -> payload
    attachments: Seq[Attachment] = ()
    min_reuse: int = 0  # shortest length it may be cut to (delayed quantization)

    def with_attachment(self, attachment: Attachment) -> State:
        return replace(self, attachments=(*self.attachments, attachment))
