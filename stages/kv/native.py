"""Keys and values as the model makes them: exact, and the reference for every other policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Rows, Target
from stages.kv.shapes import coverage, native_bytes
from stages.rows.layouts import LAYOUTS
from stages.rows.rows import LayeredRows


class Native:
    """Stores every layer kind in the model's own dtype."""

    can = frozenset({"rewind", "batch", "snapshot", "speculate", "donor"})
    identity: Mapping[str, Any] = {"kv": "native"}

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> Rows:
        refuse_unknown(target)
        layouts = [LAYOUTS[spec.kind](spec, max_width) for spec in target.specs]
        return LayeredRows(layouts, target.specs, max_width)

    def bytes_per_token(self, target: Target) -> float:
        return sum(native_bytes(spec) for spec in target.specs)

    def coverage(self, target: Target) -> Mapping[str, Any]:
        return coverage(target, range(len(target.specs)), self.bytes_per_token(target))


def refuse_unknown(target: Target) -> None:
    """OpenError naming the cache classes and layers that nothing here can store."""
    unknown: dict[str, list[int]] = {}
    for index, spec in enumerate(target.specs):
        if spec.kind not in LAYOUTS:
            unknown.setdefault(spec.kind, []).append(index)
    if unknown:
        kinds = "; ".join(f"{kind} in layers {layers}" for kind, layers in unknown.items())
        raise OpenError(
            f"kv: {target.name} keeps its state in caches that no row layout stores: {kinds}. "
            f"There are layouts for {', '.join(LAYOUTS)} layers. Choose another model, or add a "
            f"layout in stages/rows/ and its kind in stages/models/loading/layers.py."
        )
