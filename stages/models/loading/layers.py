"""What each layer keeps between forwards, read from the caches that mlx-lm's model makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from pipeline.types import LayerSpec

KINDS = {
    "KVCache": "full",
    "ConcatenateKVCache": "full",
    "RotatingKVCache": "sliding",  # "sinks" where it keeps its first tokens
    "ChunkedKVCache": "chunked",
    "ArraysCache": "recurrent",
    "MambaCache": "recurrent",
}
COMPOSITE = "CacheList"


def layer_specs(caches: Sequence[Any], latent: int | None = None) -> tuple[LayerSpec, ...]:
    """One a cache; one for each part of a composite cache, marked with a common `group`. The caches
    must have seen a token: only then do they know heads and sizes. `latent`: size of the vector from
    which the model makes keys and values itself (multi-head latent attention)."""
    return tuple(
        _spec(part, index if type(cache).__name__ == COMPOSITE else -1, latent)
        for index, cache in enumerate(caches)
        for part in leaves([cache])
    )


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches with composite ones replaced by their parts."""
    return [
        part
        for cache in caches
        for part in (cache.caches if type(cache).__name__ == COMPOSITE else (cache,))
    ]


def _spec(cache: Any, group: int, latent: int | None) -> LayerSpec:
    name = type(cache).__name__
    kind = KINDS.get(name, name)
    if kind == "full" and latent and cache.keys.shape[1::2] == (1, latent):
        kind = "latent"
    kept = getattr(cache, "keep", 0)
    if kind == "sliding" and kept:
        kind = "sinks"
    window = {"sliding": "max_size", "sinks": "max_size", "chunked": "chunk_size"}.get(kind)
    size = getattr(cache, window) - kept if window else 0
    return LayerSpec(kind, size, signature(kind, cache), group, kept)


def signature(kind: str, cache: Any) -> str:
    """Kind, then heads x size of keys (and values where they differ), then the type:
    `full:3x64:float32`; for other layers the shape of every array without its row axis."""
    if getattr(cache, "keys", None) is None:
        arrays = [a for a in _flat(getattr(cache, "state", ())) if isinstance(a, mx.array)]
        return f"{kind}:" + "+".join(f"{_times(a.shape[1:])}:{_dtype(a)}" for a in arrays)
    k, v = cache.keys, cache.values
    sizes = _times((k.shape[1], k.shape[3]))
    if v.shape != k.shape:
        sizes += "+" + _times((v.shape[1], v.shape[3]))
    return f"{kind}:{sizes}:{_dtype(k)}"


def _flat(state: Any) -> list[Any]:
    return [b for a in state for b in _flat(a)] if isinstance(state, list | tuple) else [state]


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _dtype(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")
