"""What all policies have in common that store attention layers as codes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import Rows, Target
from stages.kv.native import refuse_unknown
from stages.kv.scheme import Scheme
from stages.kv.shapes import Shape, coverage, native_bytes, shape_of
from stages.rows.layouts import LAYOUTS
from stages.rows.quantized import QuantizedLayout
from stages.rows.rows import LayeredRows

CODED = ("full", "sliding")  # latents are small already, and recurrent state is no list of tokens
Pair = tuple[Scheme, Scheme]  # of keys, of values


class Coded:
    """Each token is coded by itself as it arrives; `pairs` says which layers, and how. Others are
    kept as the model computes them."""

    can = frozenset({"rewind", "batch", "snapshot", "speculate", "donor"})

    def pairs(self, target: Target) -> Mapping[int, Pair]:
        """Layer -> how its keys and values are coded. OpenError where they cannot."""
        raise NotImplementedError

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def rows(self, target: Target, max_width: int) -> Rows:
        refuse_unknown(target)
        pairs = self.refuse(target)
        codec = cache(Scheme.codec)  # layers of one kind share rotations and codebooks
        layouts = []
        for index, spec in enumerate(target.specs):
            if index not in pairs:
                layouts.append(LAYOUTS[spec.kind](spec, max_width))
                continue
            (keys, values), shape = pairs[index], shape_of(spec)
            codecs = codec(keys, shape.key_size), codec(values, shape.value_size)
            layouts.append(QuantizedLayout(spec, max_width, *codecs))
        return LayeredRows(layouts, target.specs, max_width)

    def refuse(self, target: Target) -> Mapping[int, Pair]:
        """`pairs`; OpenError where heads cannot be coded so."""
        pairs = self.pairs(target)
        refuse_misfits(target, pairs)
        return pairs

    def bytes_per_token(self, target: Target) -> float:
        pairs = self.pairs(target)
        return sum(
            coded_bytes(shape_of(spec), *pairs[index]) if index in pairs else native_bytes(spec)
            for index, spec in enumerate(target.specs)
        )

    def coverage(self, target: Target) -> Mapping[str, Any]:
        return coverage(target, self.pairs(target), self.bytes_per_token(target))


def coded_bytes(shape: Shape, keys: Scheme, values: Scheme) -> float:
    """Bytes a token takes in a layer whose keys and values are coded so."""
    key_bytes = keys.vector_bytes(shape.key_size, shape.item_bytes)
    return shape.heads * (key_bytes + values.vector_bytes(shape.value_size, shape.item_bytes))


def all_coded(target: Target, keys: Scheme, values: Scheme) -> dict[int, Pair]:
    """Every full and sliding layer, alike."""
    return {i: (keys, values) for i, spec in enumerate(target.specs) if spec.kind in CODED}


def checked(scheme: Scheme) -> Scheme:
    """ValueError, which `build` puts under its path, for bits and groups without a kernel."""
    if said := scheme.refusal():
        raise ValueError(said)
    return scheme


def refuse_misfits(target: Target, pairs: Mapping[int, Pair]) -> None:
    """OpenError naming the layers whose heads cannot be coded, or a model whose attention is computed
    by code of its own."""
    bad: dict[str, list[int]] = {}
    for layer, (keys, values) in pairs.items():
        shape = shape_of(target.specs[layer])
        for scheme, size in {(keys, shape.key_size), (values, shape.value_size)}:
            if said := scheme.misfit(size):
                bad.setdefault(f"heads of {size} {said}", []).append(layer)
    if bad:
        said = "; ".join(f"{why}, in layers {sorted(set(layers))}" for why, layers in bad.items())
        raise OpenError(f"kv: {target.name}: {said}. Choose another group_size or kv=native.")
    if pairs and "attend" not in target.can:
        raise OpenError(
            f"kv: {target.name} computes attention by code of its own, which reads plain keys "
            f"and values only. Use kv=native."
        )
