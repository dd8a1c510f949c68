"""Keys and values as 8- or 4-bit affine codes: about a quarter or a seventh of float32's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Rows, Target
from stages.kv.native import refuse_unknown
from stages.kv.shapes import Shape, coverage, native_bytes, shape_of
from stages.rows.grid import GROUPS, KERNELS, Grid
from stages.rows.layouts import LAYOUTS
from stages.rows.quantized import QuantizedLayout
from stages.rows.rows import LayeredRows

CODED = ("full", "sliding")  # latents are small already, and recurrent state is no list of tokens


class Affine:
    """Codes every full and sliding attention layer, each token by itself as it arrives; others are
    kept as they are.

    `group_size` numbers of a head share a scale and a bias; it must divide the model's head sizes.
    """

    can = frozenset({"rewind", "batch", "snapshot", "speculate", "donor"})

    def __init__(self, *, bits: int = 8, group_size: int = 64):
        self.bits, self.group_size = bits, group_size
        self.grid = Grid(bits, group_size)
        self.identity: Mapping[str, Any] = {"kv": "affine", "bits": bits, "group_size": group_size}

    def open(self) -> None:
        refuse_grid("kv", self.grid)

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> Rows:
        refuse_unknown(target)
        grids = self.refuse(target)
        layouts = [
            QuantizedLayout(spec, max_width, self.grid, self.grid)
            if index in grids
            else LAYOUTS[spec.kind](spec, max_width)
            for index, spec in enumerate(target.specs)
        ]
        return LayeredRows(layouts, target.specs, max_width)

    def bytes_per_token(self, target: Target) -> float:
        return sum(
            coded_bytes(shape_of(spec), self.grid, self.grid)
            if spec.kind in CODED
            else native_bytes(spec)
            for spec in target.specs
        )

    def coverage(self, target: Target) -> Mapping[str, Any]:
        return coverage(target, self._grids(target), self.bytes_per_token(target))

    def refuse(self, target: Target) -> dict[int, Grid]:
        """The grid of each coded layer. OpenError where heads do not divide into groups."""
        grids = self._grids(target)
        refuse_sizes("kv", target, grids)
        return grids

    def _grids(self, target: Target) -> dict[int, Grid]:
        return {i: self.grid for i, spec in enumerate(target.specs) if spec.kind in CODED}


def coded_bytes(shape: Shape, keys: Grid, values: Grid) -> float:
    """Bytes a token takes in a layer whose keys and values are coded so."""
    key_bytes = shape.key_size * keys.bytes_a_number(shape.item_bytes)
    value_bytes = shape.value_size * values.bytes_a_number(shape.item_bytes)
    return shape.heads * (key_bytes + value_bytes)


def refuse_grid(where: str, grid: Grid) -> None:
    """OpenError for widths and groups without a kernel."""
    if grid.bits not in KERNELS:
        raise OpenError(f"{where}.bits={grid.bits}: there are kernels for {_either(KERNELS)} bits.")
    if grid.group not in GROUPS:
        raise OpenError(f"{where}.group_size={grid.group} is not {_either(GROUPS)}.")


def refuse_sizes(where: str, target: Target, grids: Mapping[int, Grid]) -> None:
    """OpenError naming the layers whose heads do not divide into their group, or a model whose
    attention is computed by code of its own."""
    bad: dict[tuple[int, int], list[int]] = {}
    for layer, grid in grids.items():
        shape = shape_of(target.specs[layer])
        for size in {shape.key_size, shape.value_size}:
            if size % grid.group:
                bad.setdefault((size, grid.group), []).append(layer)
    if bad:
        said = "; ".join(
            f"heads of {size} in layers {layers} do not divide into groups of {group}"
            for (size, group), layers in bad.items()
        )
        raise OpenError(
            f"{where}.group_size: {target.name}: {said}. Groups may be {_either(GROUPS)}; else kv=native."
        )
    if grids and "attend" not in target.can:
        raise OpenError(
            f"{where}: {target.name} computes attention by code of its own, which reads plain keys "
            f"and values only. Use kv=native."
        )


def _either(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
