"""The protocols of all parts. Contracts are written here, once; implementations do not repeat them.

Nobody inherits from these: a class joins by having the shape. Constructors store arguments and do
nothing else; `open()` loads, `close()` frees and may be called twice. Shapes: B rows, W window
width (longest row's inputs), L one row's window, V vocabulary, D hidden size. "Device array" is an
`mlx.core.array`, possibly lazy; "host array" is a `numpy.ndarray`. Unless said otherwise everything
runs on the engine's owner thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Protocol

from pipeline.types.request import Request, Sampling, TokenLogprob
from pipeline.types.sequence import Attachment, Batch, Emitted, LayerSpec, Owner, Sequence, State
from pipeline.types.text import Tokenizer

Abilities = Collection[str]

AFTER_NORM = -1  # the tap after the last norm: what the head is given
EMBEDDING = -2  # the tap before the first layer


class Part(Protocol):
    """What `can` says is checked against the stages' `needs` before anything is opened.

    A part that reads files also has `files() -> Mapping[str, Path]`: what `open` reads, by names that do
    not depend on where it lies; callable before `open`, OpenError if it is not there. Locks keep their
    digests. One with a `detail` is shown with it in the graph.
    """

    can: Abilities

    def open(self) -> None: ...
    def close(self) -> None: ...


class Stage(Protocol):
    """One step of the pipeline. `reads`/`writes` name fields of `Sequence`; a stage touches no other.

    `needs` maps a group (`kv`, `drafter`, …) to abilities its part must have. `thread` is where it
    runs: "prepare" (pool, no device arrays), "owner" or "io". `run` takes a batch, even of one; it
    may be called with no row that has work for it. A failure of one row is written to its `error`;
    an exception means that the whole batch's rows are no longer valid.
    """

    reads: Collection[str]
    writes: Collection[str]
    needs: Mapping[str, Abilities]
    thread: str

    def run(self, batch: Batch) -> None: ...


class Device(Part, Protocol):
    """Where MLX runs. Opened before mlx is imported anywhere."""

    kind: str  # cpu | metal | cuda, after open
    weights: str  # float32 | as_is: what checkpoints with 16-bit scales become on a CPU

    def describe(self) -> Mapping[str, Any]:
        """BLAS, threads, device and versions, for /health and doctor."""

    def libraries(self) -> Mapping[str, Path]:
        """Files, by name, that are loaded beside MLX and whose build may change what is computed."""

    def release(self) -> None:
        """Give memory that was freed, and kept for what comes next, back to the system."""

    def limit_memory(self, nbytes: int | None) -> Mapping[str, int]:
        """Bound what MLX may allocate, and on Metal keep resident; None puts back what was before.
        The bounds now in force, by name."""


class Target(Part, Protocol):
    """A language model. Attributes below are known after `open()`."""

    name: str
    tokenizer: Tokenizer
    artifact: str  # digest of the weights and the code version that reads them
    vocab_size: int
    context_len: int  # positions; none at or past it is ever run
    eos_ids: frozenset[int]
    generation: Sampling  # the model's generation_config, None where it says nothing
    specs: tuple[LayerSpec, ...]  # one a layer that keeps state
    dtype: str
    weight_bytes: int
    calls: int  # forwards launched so far; whoever launches one adds it, and tests count them

    def hidden(self, tokens_BW: Any, caches: Seq[Any]) -> Any:
        """hidden_BWD after the last norm. Lazy."""

    def head(self, hidden_BWD: Any) -> Any:
        """logits_BWV, soft-cap included. Lazy."""

    # Below: what drafters look at. Only targets whose `can` says "taps" have it.

    layer_count: int  # decoder layers, those that keep no state of their own included
    hidden_size: int
    model_config: Mapping[str, Any]  # the checkpoint's config.json as it stands there
    home: Any  # Path of the checkpoint's folder; None where there is none

    def tapped(self, tokens_BW: Any, caches: Seq[Any], taps: Seq[int]) -> tuple[Any, Any]:
        """hidden_BWD, and the outputs of the layers `taps` side by side in that order,
        (B, W, hidden_size * len(taps)). Lazy."""

    def embed(self, tokens_BW: Any) -> Any:
        """Embeddings (B, W, hidden_size) as the first layer gets them, multiplier included. Lazy."""

    def prefill_chunk(self, prompt_len: int) -> int | None:
        """Preferred chunk in tokens for a prompt of this length; None: the stage decides."""

    # Below: what adapters change. Only targets whose `can` says "adapt".

    row_adapters: Any  # asked, while a pass is built, what each of its rows wears

    def modules(self) -> Mapping[str, Any]:
        """The model's modules by the checkpoint's names, where adapters look for what they change."""


class Round(Protocol):
    """One open transaction on `Rows`: forward once over `tokens_BW` with `caches`, then resolve.

    Row b's asked tokens are `widths[b]` columns; their outputs lie in `columns(b)`. Columns beyond
    are padding: never sampled, never kept. Exactly one of `resolve` and `abandon` ends it.
    """

    @property
    def tokens_BW(self) -> Any:
        """Device int32: the real input, possibly longer than asked (replayed tokens)."""

    @property
    def caches(self) -> Seq[Any]:
        """One a layer, as mlx-lm's models take them."""

    @property
    def widths(self) -> Seq[int]: ...

    def columns(self, row: int) -> slice: ...
    def feed(self, tokens: Seq[int]) -> None:
        """Fill in the inputs of a round begun by `begin_ahead`, one a row, before it is launched."""

    def launch(self, *arrays: Any) -> None:
        """Start evaluating `arrays` and the rows' new state. From here on only coverage can move."""

    def wait(self) -> None:
        """Block until the rows' state after the launched forward has been computed."""

    def resolve(self, keep: Seq[int]) -> None:
        """Keep the first `keep[b]` (0..widths[b]) asked inputs of each row. Afterwards the rows hold
        exactly the kept tokens. AssertionError out of range or if not the oldest open round."""

    def abandon(self) -> None:
        """End a round that was never launched; the rows are as before `begin`."""


class Change(Protocol):
    """A prepared change of membership. Everything that can fail has happened."""

    def commit(self) -> None:
        """Swap it in. Cannot fail."""

    def dispose(self) -> None:
        """Free what was not used: the new state before `commit`, the old one after."""


class Rows(Protocol):
    """State of all rows in all layers. `lengths[b]` tokens are held by row b in every layer."""

    @property
    def size(self) -> int: ...
    @property
    def lengths(self) -> Seq[int]: ...

    def begin(self, tokens: Seq[Seq[int]]) -> Round:
        """Open a round with these inputs (host ids, ragged; a row may have none)."""

    def begin_ahead(self) -> Round:
        """Open a round of one input a row on top of the launched one, assuming that it keeps
        everything; its ids are given later by `feed`. If the assumption fails: `abandon`."""

    def prepare_append(self, states: Seq[State | None]) -> Change:
        """New rows at the end, empty for None, else holding the state's tokens (materialized)."""

    def filter(self, keep: Seq[int]) -> None:
        """Keep these rows, in this order. An empty list leaves reusable empty rows."""

    def extract(self, row: int, tokens: Seq[int], namespace: str) -> State:
        """The row's state for joining other rows at once: arrays may be lazy views."""

    def capture(self, row: int, tokens: Seq[int], namespace: str, start: int = 0) -> State:
        """An owned, evaluated, compact state of the row's first len(tokens) tokens, whose segments
        begin at `start` (the tier already holds the rest)."""

    def reusable_from(self, row: int, length: int) -> int:
        """`State.min_reuse` of a capture of the row's first `length` tokens."""

    def cuttable_later(self, length: int) -> bool:
        """Whether a state of `length` tokens can still be had, of any row, once it has gone on."""

    def donor(self, layer: int) -> tuple[Any, Any, Seq[int]] | None:
        """For drafters that attend to the target's own keys: keys and values (B, H, T, D) of an
        attention layer in temporal order, spelled out, and the position of each row's first slot;
        None before the first token. Lazy; use it up before the next round. Only where the policy
        can "donor"."""

    def nbytes(self) -> int: ...
    def check_integrity(self) -> None:
        """Recount everything; AssertionError with the numbers."""

    def close(self) -> None: ...


class KVPolicy(Part, Protocol):
    """How keys, values and other layer state are stored. `identity` goes into the namespace."""

    identity: Mapping[str, Any]

    def rows(self, target: Target, max_width: int) -> Rows:
        """Empty rows; a round may be up to `max_width` wide without losing what windows need.
        OpenError where the model has a layer kind this policy cannot store, naming the layers."""

    def bytes_per_token(self, target: Target) -> float: ...
    def coverage(self, target: Target) -> Mapping[str, Any]:
        """What this policy does to an opened model: `layers` that keep state, `covered` of them,
        `kept` as the model computes them (reason -> how many), and `bytes_per_token`."""


class DraftRows(Protocol):
    """The drafter's own state of every row of the batch, in the same order.

    Between rounds each row has processed exactly the tokens the target's row holds. `hidden` is what
    the drafter's taps saw in the target's pass, (B, W, hidden_size * taps), or None without taps: row
    b's first columns belong to the tokens it is given here, columns beyond are padding or rejected.
    """

    @property
    def size(self) -> int: ...

    def assign(self, owners: Seq[Owner]) -> None:
        """Whose the rows are, before each `draft`. Said of a row in the same words to its end."""

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        """The target's rows took these prompt tokens."""

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """0..depths[b] ids a row to follow `pending[b]`; a `Proposal` says more. Deterministic."""

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        """The target's rows kept these inputs of the round `draft` was called for: pending and a
        prefix of the row's own proposal; of a drafter that can "external" also another's."""

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        """The same for a round in which `draft` was not called."""

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        """Rows that have processed `tokens`: from the attachment where it fits, else refilled from
        the ids where the drafter can, else cold."""

    def filter(self, keep: Seq[int]) -> None: ...
    def capture(self, row: int) -> Attachment | None: ...
    def check_integrity(self) -> None: ...
    def close(self) -> None: ...


class Drafter(Part, Protocol):
    """Proposes tokens. A failure in here costs a row its speculation, never its answer.

    `prefill` is "tail" (the last prompt token heads the first window) or "full" (token 0 is sampled
    from prefill). `namespace` identifies artifact, method and settings, known without opening rows.
    One that loads weights or keeps device state of its own also says `weight_bytes` and
    `bytes_per_token`, which limits bill. One that has a method `learn(namespace, ids)` is told each
    answer that has ended.
    """

    prefill: str
    namespace: str
    taps: Seq[int]  # layers whose outputs it wants to see (or AFTER_NORM, EMBEDDING), after `open`

    def rows(self, target: Target, max_width: int) -> DraftRows:
        """Empty rows. If they have a method `watch`, it is given the target's rows of their batch; if
        `faults`, it says what has failed inside without the rows failing, as `GuardedRows.faults` does."""


class Depth(Part, Protocol):
    """How many tokens to draft. `max` bounds every row and sets the rows' `max_width` (max + 1)."""

    max: int

    def choose(self, batch: Batch) -> list[int]:
        """Depth of each row for this round, 0..max; what the drafter is asked for."""

    def cut(self, batch: Batch, proposals: Seq[Seq[int]]) -> list[int]:
        """How many leading ids of each row's proposal are verified. Called after `draft`; decides by
        lengths and `confidence`, never by the ids of this round's proposals."""

    def observe(self, batch: Batch, seconds: float) -> None:
        """The round just committed took this long from draft to commit."""


class RowSampler(Protocol):
    """One request's way of choosing tokens. Noise depends on (seed, position) alone."""

    greedy: bool  # plain argmax: no history, no noise, no constraint, no log-probabilities
    matcher: Matcher  # the row's place in its constraint; `push` and `restart` move it along

    def draw(self, logits_V: Any, position: int) -> tuple[int, TokenLogprob | None]:
        """The target's own token at absolute `position`; changes nothing. logits_V is a host array."""

    def law(self, logits_V: Any) -> Any:
        """Probabilities_V (host, float64) by which `draw` draws, the filtered ones 0."""

    def coin(self, position: int, turn: int) -> float:
        """In (0, 1), a function of seed, position and turn, independent of `draw`'s noise."""

    def logprob(self, logits_V: Any, token_id: int) -> TokenLogprob | None:
        """What `draw` would say of this token."""

    def overruled(self, logits_V: Any) -> bool:
        """Whether the constraint forbids the highest score at the row's place. Changes nothing."""

    def push(self, token_id: int) -> None:
        """This token was emitted; penalties see it from now on."""

    def restart(self, output_ids: Seq[int]) -> None:
        """After a fault: exactly these tokens were emitted."""


class Sampler(Part, Protocol):
    """Recipe defaults of sampling and the maker of row samplers."""

    defaults: Sampling

    def bind(
        self,
        sampling: Sampling,
        seed: int,
        prompt_ids: Seq[int],
        logprobs: int | None,
        matcher: Matcher | None = None,
    ) -> RowSampler:
        """`sampling` is resolved: nothing in it is None except seed. Without a matcher: unconstrained."""


class Rule(Part, Protocol):
    """Decides what the target agrees with."""

    def accept(
        self, sequence: Sequence, logits_LV: Any, limit: int, eos_ids: Collection[int]
    ) -> tuple[list[Emitted], int]:
        """Walk the window: emitted tokens (accepted drafts, then a correction or bonus) and how many
        drafts were accepted. Stops after an EOS (emitted last, counted as accepted if drafted) and
        after `limit` tokens; nothing beyond is sampled. Each has its origin where the request wants
        that. logits_LV is a host array."""


class Matcher(Protocol):
    """One row's place in its constraint; moved by emitted tokens only, asked on the owner thread."""

    free: bool  # every token is allowed, always

    @property
    def done(self) -> bool:
        """Satisfied, and nothing can follow: the row ends, and nothing more is sampled."""

    def mask(self, logits_V: Any) -> Any:
        """The scores (host) with -inf at what may not come next; allowed scores untouched. A new
        array if anything differs. RuntimeError where nothing may come."""

    def push(self, token_id: int) -> None: ...
    def restart(self, output_ids: Seq[int]) -> None:
        """After a fault or a resume: exactly these tokens were emitted."""

    def legal(self, token_ids: Seq[int]) -> int:
        """How many leading tokens of a proposal may come. Changes nothing."""

    def forced(self, limit: int) -> list[int]:
        """0..limit tokens that spell what must come, as the tokenizer would. Changes nothing. Another
        spelling may be legal too, so they are a proposal and no decision."""


class Constraint(Part, Protocol):
    """Compiles a request's grammar; on the preparation pool, so safe on any thread."""

    def bind(self, request: Request, target: Target, thinking: bool) -> Matcher:
        """A free matcher for a request without a grammar. `thinking`: the answer begins inside a
        reasoning section, which no grammar binds. RequestError that says where, if the
        grammar cannot be compiled or this option takes none."""


Work = Callable[[], Any]
