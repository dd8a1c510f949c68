"""Making targets for tests without an engine around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pipeline.types import Target

TOKENS = mx.array([[5, 90, 17, 260, 31, 8, 8, 200]])


@dataclass
class Cpu:
    """The only part a target takes."""

    weights: str = "float32"
    kind: str = "cpu"
    can: frozenset[str] = frozenset()
    blas: str = "extension"

    def open(self) -> None: ...
    def close(self) -> None: ...
    def describe(self) -> Mapping[str, Any]:
        return {"blas": self.blas}


def opened(part: Any) -> Any:
    part.open()
    return part


def caches(target: Target) -> list[Any]:
    """mlx-lm's own caches: what the layer specs were read from."""
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    split = getattr(target, "_split", None)
    return make_prompt_cache(split.model) if split else [KVCache() for _ in target.specs]


def scores(target: Target) -> mx.array:
    """One plain forward of a few tokens, without caches."""
    return target.head(target.hidden(TOKENS, None))


def greedy(target: Target, text: str, count: int) -> list[int]:
    """The ids that follow `text`, on mlx-lm's own caches."""
    ids: list[int] = []
    state, tokens = caches(target), mx.array([target.tokenizer.encode(text)])
    for _ in range(count):
        best = target.head(target.hidden(tokens, state)[:, -1:])[0, -1].argmax()
        ids.append(int(best.item()))
        tokens = mx.array([ids[-1:]])
    return ids
