"""The sizes a policy computes with, read from a layer's signature, and what it does to a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pipeline.types import LayerSpec, Target
from stages.rows.state import is_exact

KEPT = {  # kind -> why a policy leaves such layers as the model computes them
    "latent": "latent: a token is one small vector already",
    "recurrent": "recurrent: one state of a fixed size, not one a token",
    "chunked": "chunked: not coded yet",
    "sinks": "sinks: not coded yet",
}


@dataclass(frozen=True)
class Shape:
    """Of one attention layer."""

    heads: int
    key_size: int
    value_size: int
    dtype: mx.Dtype  # of a number as the model computes it

    @property
    def item_bytes(self) -> int:
        return int(self.dtype.size)


def shape_of(spec: LayerSpec) -> Shape:
    """From `kind:HxD:dtype`, or `kind:HxD+HxD:dtype` where values have another size."""
    _, sizes, dtype = spec.signature.split(":")
    (heads, key_size), (_, value_size) = (
        map(int, part.split("x")) for part in (sizes.split("+") * 2)[:2]
    )
    return Shape(heads, key_size, value_size, getattr(mx, dtype))


def native_bytes(spec: LayerSpec) -> float:
    """Bytes a token takes in a layer that keeps it as the model computes it; 0 where no token is kept."""
    if is_exact(spec):
        return 0.0
    shape = shape_of(spec)
    return shape.heads * (shape.key_size + shape.value_size) * shape.item_bytes


def coverage(
    target: Target, covered: Collection[int], token_bytes: float, why: Mapping[str, str] = KEPT
) -> Mapping[str, Any]:
    """`KVPolicy.coverage` of a policy that changes the layers `covered`; `why` it keeps the others, by
    their kind, or "KIND: not chosen"."""
    kinds = [spec.kind for i, spec in enumerate(target.specs) if i not in covered]
    return {
        "layers": len(target.specs),
        "covered": len(covered),
        "kept": dict(Counter(why.get(kind, f"{kind}: not chosen") for kind in kinds)),
        "bytes_per_token": token_bytes,
    }
