"""Limits on counts and lengths; memory is estimated, not budgeted."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from pipeline.errors import RequestError, below, refuse
from pipeline.types import Adapters, Depth, Drafter, KVPolicy, Sequence, Target, Tier
from stages.limits.estimate import Estimate


class Advisory:
    """Bounds rows, queue, answer and context.

    `max_rows`: requests that decode together. `max_queue`: requests that wait; more get 429.
    `max_tokens`: cap on every answer. `context`: cap on prompt and answer together, where it should
    be below the model's own. `chunk`: what prefill feeds at once, for the estimate. ValueError names
    settings that are out of range. What rows may come to need is shown in /stats and holds nobody up.
    """

    can = frozenset[str]()

    def __init__(
        self,
        target: Target,
        kv: KVPolicy,
        depth: Depth,
        drafter: Drafter,
        draft_model: Target,
        adapters: Adapters,
        tier: list[Tier],
        *,
        max_rows: int = 8,
        max_queue: int = 64,
        max_tokens: int | None = None,
        context: int | None = None,
        chunk: int = 512,
    ) -> None:
        self.max_rows, self.max_queue = max_rows, max_queue
        self.max_tokens, self.context, self.chunk = max_tokens, context, chunk
        refuse(**self.wrong())
        self.target, self.adapters, self.tiers = target, adapters, tier
        self.estimate = Estimate(target, kv, depth, drafter, draft_model, adapters, chunk)

    def wrong(self) -> dict[str, str]:
        """What is out of range, by setting."""
        return {
            "max_rows": below(self.max_rows, 1),
            "max_queue": below(self.max_queue, 0),
            "max_tokens": below(self.max_tokens, 1),
            "context": below(self.context, 2),
            "chunk": below(self.chunk, 1),
        }

    def open(self) -> None: ...

    def close(self) -> None: ...

    def admit(
        self, prompt_len: int, max_new: int, target: Target, kv: KVPolicy, param: str
    ) -> None:
        """RequestError if the prompt leaves no room for one token. `max_new` never refuses a request,
        it is a ceiling that the engine clamps. `param`: the field the prompt came in."""
        room = target.context_len if self.context is None else min(self.context, target.context_len)
        if prompt_len >= room:
            raise RequestError(
                f"the prompt has {prompt_len} tokens; the context is {room} tokens and at least 1 is "
                "needed for the answer",
                param=param,
                code="context_length_exceeded",
            )

    def fits(self, sequence: Sequence, running: Seq[Sequence], kept: Seq[int] = ()) -> bool:
        return True

    def stats(self, running: Seq[Sequence], kept: Seq[int] = ()) -> Mapping[str, Any]:
        counts = self.estimate.of([length(sequence) for sequence in running], kept)
        held = sum(int(t.stats()["memory_bytes"]) for t in self.tiers if "shrink" in t.can)
        return {"estimate": {**counts, "tiers_bytes": held}, "enforced": {}}


def length(sequence: Sequence) -> int:
    """Tokens the sequence's row may come to hold."""
    return len(sequence.prompt_ids) + sequence.max_new
