"""The sizes a policy computes with, read from a layer's signature."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.types import LayerSpec
from stages.rows.state import is_exact


@dataclass(frozen=True)
class Shape:
    """Of one attention layer."""

    heads: int
    key_size: int
    value_size: int
    item_bytes: int  # of a number as the model computes it


def shape_of(spec: LayerSpec) -> Shape:
    """From `kind:HxD:dtype`, or `kind:HxD+HxD:dtype` where values have another size."""
    _, sizes, dtype = spec.signature.split(":")
    (heads, key_size), (_, value_size) = (
        map(int, part.split("x")) for part in (sizes.split("+") * 2)[:2]
    )
    return Shape(heads, key_size, value_size, 4 if dtype == "float32" else 2)


def native_bytes(spec: LayerSpec) -> float:
    """Bytes a token takes in a layer that keeps it as the model computes it; 0 where no token is kept."""
    if is_exact(spec):
        return 0.0
    shape = shape_of(spec)
    return shape.heads * (shape.key_size + shape.value_size) * shape.item_bytes
