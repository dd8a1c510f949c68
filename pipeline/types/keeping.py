"""The protocols of those who keep saved states for later requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from pipeline.types.parts import Part
from pipeline.types.sequence import State


class Match(Protocol):
    """A borrowed state. Materialize it (prepare_append), then `release`."""

    state: State
    tier: str

    def release(self) -> None: ...


class Fetch(Protocol):
    """A look-up that reads on another thread. Exactly one of `take` and `release` ends it."""

    def done(self) -> bool:
        """Whether `take` can be asked: it was read, or took too long, which is a miss."""

    def take(self) -> Match | None: ...
    def release(self) -> None: ...


class Keeper(Protocol):
    """Who wants to know what a tier holds and loses. `key` is packed int32 token ids."""

    def stored(self, namespace: str, key: bytes) -> None:
        """A state of exactly these tokens is held now."""

    def leaving(self, namespace: str, key: bytes, make: Callable[[], State]) -> None:
        """It is about to go; `make` gives it, now or never."""


class Attempt(Protocol):
    """One go at an answer. While anybody refers to it, nobody else goes on from what it left."""

    label: str  # namespace of the record (an attachment) that each captured state carries


class Attempts(Protocol):
    """Captures of answers under way. `key` says whose: equal only for the same request."""

    def begin(self, key: str) -> Attempt: ...
    def left(self, key: str, tokens: Seq[int], namespace: str) -> Iterator[tuple[Attempt, Fetch]]:
        """What attempts that ended before their answer did have left for a prompt, furthest first; a
        state begins to be read when its turn comes. Nothing while the removal of an ended one is not done."""

    def take(self, attempt: Attempt, state: State) -> bool:
        """Write a state with the attempt's record while rows decode. False if it was dropped."""

    def under_way(self, attempt: Attempt) -> bool:
        """Whether the last state taken is still to be written. Once it is there, the one before goes."""

    def end(self, attempt: Attempt) -> None:
        """The answer is complete: nothing of it is gone on from, from now on."""

    def step(self) -> None:
        """One bounded piece of writing, while rows decode; no waiting for the disk."""


class Tier(Part, Protocol):
    """Keeps saved states by token prefix and namespace. A tier that fails is a miss, never an error.

    `can` may say "shrink" (it holds memory: `memory_bytes` in its `stats`), "watch" (a `Keeper` may take
    what it loses), "fetch" (a look-up takes time), "sessions" (last states of a session are kept first),
    "durable" (what it has written outlives the process) and "resume" (it keeps answers under way).
    Where a member says "only" it is asked for only there.
    """

    name: str
    attempts: Attempts  # only "resume"

    def usable(self, tokens: Seq[int], namespace: str, limit: int) -> int:
        """How many tokens `lookup` would give, without reading anything. O(len(tokens))."""

    def lookup(self, tokens: Seq[int], namespace: str, limit: int) -> Match | None:
        """The longest usable state for a prefix of `tokens`, at most `limit` long. O(len(tokens))."""

    def covered(self, tokens: Seq[int], namespace: str, min_reuse: int = 0) -> int:
        """How many leading tokens are held already, as states of that `min_reuse` hold them (0, or
        more), so that `capture` need not copy them."""

    def put(self, state: State) -> bool:
        """Take ownership. False if it was dropped (over the cap, or its base is gone)."""

    def idle_step(self) -> bool:
        """Do one bounded piece of background work while nothing runs; True if more is left."""

    def clear(self) -> None: ...
    def fetch(self, tokens: Seq[int], namespace: str, limit: int) -> Fetch | None:
        """Begin a `lookup`; None where it would find nothing. Only "fetch"."""

    def shrink(self, nbytes: int) -> int:
        """Hold at most `nbytes` of memory from now on, evicting if need be; what it may hold now, less
        where its own cap is less. Only "shrink"."""

    def watch(self, keeper: Keeper) -> None:
        """Tell `keeper` from now on. Only "watch"."""

    def borrow(self, tokens: Seq[int], namespace: str) -> Match | None:
        """The state of exactly these tokens, for `keeper`: this is no use of it. Only "watch"."""

    def demote(self, idle_s: float) -> float | None:
        """Let one state go that nobody has used for `idle_s`; seconds until the next is due, None while
        nothing is held. Only "watch": the keeper has what is let go."""

    def keep(self, session: str, tokens: Seq[int], namespace: str) -> None:
        """These tokens are the session's last state: let others go before it. Only "sessions"."""

    def recall(self, session: str, tokens: Seq[int], namespace: str, limit: int) -> Match | None:
        """The session's last state if at most `limit` of `tokens` begin with it. Only "sessions"."""

    def forget(self, session: str) -> None:
        """Its states are like others from now on. Any thread. Only "sessions"."""

    def durable(self, tokens: Seq[int], namespace: str) -> bool:
        """Whether a state of exactly these tokens would be found after a restart. Only "durable"."""

    def wait(self, seconds: float) -> None:
        """Let what is being written get on with it, at most so long. Only "durable"."""

    def stats(self) -> Mapping[str, int | float]: ...
    def check_integrity(self) -> None: ...
