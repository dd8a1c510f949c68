"""Limits that keep what runs within a number of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.errors import OpenError, RequestError
from pipeline.types import Device, KVPolicy, Sequence, Target
from stages.limits.advisory import Advisory, length

GB = 1e9
MOST_GB = 1e9  # what a 64-bit number of bytes can say
SHARE = 0.75  # of the machine's memory, what is proposed to who asks for more than all
QUEUE_SHARE = (
    4  # of the room for saved states, what waits to be written gets at most one part in so many
)


class Budget(Advisory):
    """`Advisory`, and: everything that MLX holds must fit into `memory_gb` (10^9 bytes).

    That is weights, the most that adapters may take (they come and go), rows as long as they may
    become, saved states in memory, and `work_gb` for what a pass computes with. A request waits until
    its row fits beside those that run; saved states go first, then rows of lower priority are parked.
    One that would not fit alone is refused with the arithmetic; an answer's ceiling is clamped to what
    fits, like to the context. The same number is MLX's own memory limit while this is open.
    ValueError for settings out of range; OpenError where the model leaves no room for a row, or
    the machine has less.
    """

    can = frozenset({"park"})

    def __init__(
        self, device: Device, *parts: Any, memory_gb: float, work_gb: float = 0.25, **counts: Any
    ) -> None:
        """`parts` and `counts` are what `Advisory` takes."""
        self.memory_gb, self.work_gb = memory_gb, work_gb
        super().__init__(*parts, **counts)
        self.device = device
        self.total, self.work = round(memory_gb * GB), round(work_gb * GB)
        self.enforced: Mapping[str, int] = {}
        self._asked_context = self.context

    def wrong(self) -> dict[str, str]:
        total, work = self.memory_gb, self.work_gb
        bounded, room = 0 < total <= MOST_GB, 0 <= work < total
        return {
            **super().wrong(),
            "memory_gb": ""
            if bounded
            else f"wants a number > 0, at most {MOST_GB:,.0f}, got {total}",
            "work_gb": "" if room else f"wants 0 to less than memory_gb={total}, got {work}",
        }

    def open(self) -> None:
        """Called when the models are open: from here on their weights are known."""
        here = int(self.device.describe()["memory_bytes"])
        if self.total > here:
            raise OpenError(
                f"limits.memory_gb: {self.memory_gb:g} is more than the {here / GB:.1f} that this machine "
                f"has: nothing would be bounded. Try limits.memory_gb={SHARE * here / GB:.0f}."
            )
        fitting = self._longest(self.target.context_len)
        if fitting < 2:
            raise OpenError(f"limits.memory_gb: no row of 2 tokens fits: {self._arithmetic(2)}")
        self.context = min(fitting, self._asked_context or fitting)
        self.enforced = self.device.limit_memory(self.total)

    def close(self) -> None:
        if self.enforced:
            self.device.limit_memory(None)
        self.enforced, self.context = {}, self._asked_context

    @property
    def free(self) -> int:
        """Bytes for rows and saved states."""
        return self.total - self.work - self.estimate.weights - self.adapters.max_bytes

    def admit(
        self, prompt_len: int, max_new: int, target: Target, kv: KVPolicy, param: str
    ) -> None:
        """RequestError also if the prompt and one token of an answer would not fit alone."""
        if prompt_len < target.context_len and self.estimate.row(prompt_len + 1) > self.free:
            raise RequestError(
                f"the prompt has {prompt_len} tokens and can never fit: "
                f"{self._arithmetic(prompt_len + 1)}",
                param=param,
                code="memory_budget_exceeded",
            )
        super().admit(prompt_len, max_new, target, kv, param)

    def fits(self, sequence: Sequence, running: Seq[Sequence], kept: Seq[int] = ()) -> bool:
        need = self.estimate.rows([length(s) for s in [*running, sequence]])
        need += self.estimate.parked(kept)
        if need > self.free and (running or kept):
            return False  # one row by itself was clamped to what fits
        self._share(self.free - need)
        return True

    def _share(self, room: int) -> None:
        """Saved states get what is left; of it a part is for what waits to be written."""
        holders = [tier for tier in self.tiers if "shrink" in tier.can]
        for tier in holders[:0:-1]:
            room -= tier.shrink(room // QUEUE_SHARE)
        for tier in holders[:1]:
            tier.shrink(room)

    def stats(self, running: Seq[Sequence], kept: Seq[int] = ()) -> Mapping[str, Any]:
        found = super().stats(running, kept)
        estimate = {**found["estimate"], "work_bytes": self.work, "budget_bytes": self.total}
        return {"estimate": estimate, "enforced": dict(self.enforced)}

    def _longest(self, most: int) -> int:
        """Most tokens of a row that fits alone, up to `most`; 0 if none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fitting = self.estimate.row(middle) <= self.free
            low, high = (middle, high) if fitting else (low, middle - 1)
        return low

    def _arithmetic(self, tokens: int) -> str:
        row, weights = self.estimate.row(tokens), self.estimate.weights
        room = self.adapters.max_bytes
        needed = row + weights + room + self.work
        adapters = f" + adapters {room:,} (adapters.max_gb)" if room else ""
        return (
            f"weights {weights:,}{adapters} + work {self.work:,} + a row of {tokens} tokens {row:,} "
            f"= {needed:,} bytes, budget {self.total:,}"
        )
