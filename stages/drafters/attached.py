"""A draft model's saved state as an attachment of the target's, and back."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from pipeline.types import Attachment, LayerSlice, LayerSpec, Segment, State

SCHEMA = "draft-rows-v1"


def attach(state: State) -> Attachment:
    """`processed` tokens of the row; each tensor's metadata says `layer/first/name`, or `layer//name`
    for a layer that cannot be cut."""
    metadata: dict[str, str | int | float | bool] = {"processed": len(state.tokens)}
    tensors: list[Any] = []
    for layer, piece in enumerate(state.segments[0].layers):
        for name, array in (piece.arrays if piece else {}).items():
            metadata[f"tensor{len(tensors)}"] = f"{layer}/{piece.first}/{name}" if piece else ""
            tensors.append(array)
    for layer, payload in state.boundaries.get(len(state.tokens), {}).items():
        for name, array in payload.items():
            metadata[f"tensor{len(tensors)}"] = f"{layer}//{name}"
            tensors.append(array)
    return Attachment(state.namespace, SCHEMA, metadata, tuple(tensors))


def attached(
    attachment: Attachment | None, tokens: Seq[int], namespace: str, specs: tuple[LayerSpec, ...]
) -> State | None:
    """The state it was made from, of the first `processed` of `tokens`; None if it is another's."""
    if attachment is None or (attachment.schema, attachment.namespace) != (SCHEMA, namespace):
        return None
    length = int(attachment.metadata["processed"])
    if not 0 < length <= len(tokens):
        return None
    cut: dict[int, dict[str, Any]] = {}
    exact: dict[int, dict[str, Any]] = {}
    firsts: dict[int, int] = {}
    for index, tensor in enumerate(attachment.tensors):
        layer, first, name = str(attachment.metadata[f"tensor{index}"]).split("/")
        (cut if first else exact).setdefault(int(layer), {})[name] = tensor
        if first:
            firsts[int(layer)] = int(first)
    layers = [
        LayerSlice(firsts[i], cut[i])
        if i in cut
        else None
        if i in exact
        else LayerSlice(length, {})
        for i in range(len(specs))
    ]
    segment = Segment(0, length, tuple(layers))
    boundaries = {length: exact} if exact else {}
    return State(tuple(tokens[:length]), namespace, specs, (segment,), boundaries)
