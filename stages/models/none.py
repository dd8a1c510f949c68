"""No model: for groups where one may be left out (a draft model)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.types import LayerSpec, Sampling
from stages.models.fake import ByteTokens


class NoModel:
    """A target that knows nothing and must not be asked."""

    can: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.name = self.dtype = "none"
        self.artifact, self.tokenizer = "", ByteTokens(None)
        self.vocab_size = self.context_len = self.weight_bytes = self.calls = 0
        self.eos_ids: frozenset[int] = frozenset()
        self.generation, self.specs = Sampling(), tuple[LayerSpec, ...]()
        self.notes: list[str] = []

    def open(self) -> None: ...

    def close(self) -> None: ...

    def hidden(self, tokens_BW: Any, caches: Sequence[Any]) -> Any:
        raise AssertionError("model=none was asked for a forward")

    def head(self, hidden_BWD: Any) -> Any:
        raise AssertionError("model=none was asked for scores")

    def prefill_chunk(self, prompt_len: int) -> int | None:
        return None
