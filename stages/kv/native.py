"""Keys and values as the model makes them: exact, and the reference for every other policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Rows, Target
from stages.kv.shapes import native_bytes, shape_of
from stages.rows.attention import AttentionLayout
from stages.rows.rows import LayeredRows

STORED = ("full", "sliding")


class Native:
    """Stores full and sliding attention layers in the model's own dtype."""

    can = frozenset({"rewind", "batch", "snapshot", "speculate"})
    identity: Mapping[str, Any] = {"kv": "native"}

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> Rows:
        refuse_unknown(target)
        layouts = [AttentionLayout(spec, max_width) for spec in target.specs]
        return LayeredRows(layouts, target.specs, max_width)

    def bytes_per_token(self, target: Target) -> float:
        return sum(native_bytes(shape_of(spec)) for spec in target.specs)


def refuse_unknown(target: Target) -> None:
    """OpenError naming the layers whose state nothing here can store."""
    unknown: dict[str, list[int]] = {}
    for index, spec in enumerate(target.specs):
        if spec.kind not in STORED:
            unknown.setdefault(spec.kind, []).append(index)
    if unknown:
        kinds = "; ".join(f"{kind} in layers {layers}" for kind, layers in unknown.items())
        raise OpenError(
            f"kv: {target.name} keeps state that no kv policy here can store: {kinds}. "
            f"It stores {' and '.join(STORED)} attention. Choose another model."
        )
