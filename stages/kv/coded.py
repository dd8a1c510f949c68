"""What all policies have in common that store attention layers as codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pipeline.errors import OpenError, at_least
from pipeline.types import LayerSpec, Rows, Target
from stages.kv.native import refuse_unknown
from stages.kv.scheme import Scheme
from stages.kv.shapes import Shape, coverage, native_bytes, shape_of
from stages.rows.codes import Codec
from stages.rows.delayed import DelayedLayout
from stages.rows.layouts import LAYOUTS
from stages.rows.quantized import QuantizedLayout
from stages.rows.rows import LayeredRows

Pair = tuple[Scheme, Scheme]  # of keys, of values


class Coded:
    """Each token is coded by itself as it arrives; `pairs` says which layers, and how. Others are
    kept as the model computes them.

    `start`: queries from this position on read codes, earlier ones what the model computed, which a
    row keeps beside the codes until it has passed `start`."""

    can = frozenset({"rewind", "batch", "snapshot", "speculate", "donor"})

    def __init__(self, start: int = 0):
        self.start = at_least("start", start, 0)

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
        layouts = [
            coded_layout(spec, max_width, pairs[index], codec, self.start)
            if index in pairs
            else LAYOUTS[spec.kind](spec, max_width)
            for index, spec in enumerate(target.specs)
        ]
        return LayeredRows(layouts, target.specs, max_width)

    def refuse(self, target: Target) -> Mapping[int, Pair]:
        """`pairs`; OpenError where heads cannot be coded so, or no text is long enough to be."""
        pairs = self.pairs(target)
        if self.start and self.start >= target.context_len:
            raise OpenError(
                f"kv.start: {target.name} has a context of {target.context_len:,} tokens, so nothing "
                f"would read codes from position {self.start:,} on, and rows would hold both for good. "
                f"Choose a smaller start, or kv=native."
            )
        refuse_misfits(target, pairs, asks=self.start > 0)
        return pairs

    def bytes_per_token(self, target: Target) -> float:
        pairs = self.pairs(target)
        return sum(
            coded_bytes(shape_of(spec), *pairs[index]) if index in pairs else native_bytes(spec)
            for index, spec in enumerate(target.specs)
        )

    def early_bytes_per_token(self, target: Target) -> float:
        """What a token takes besides, as long as its row has not passed `start`."""
        early = self.pairs(target) if self.start else ()
        return sum(native_bytes(target.specs[index]) for index in early)

    def coverage(self, target: Target) -> Mapping[str, Any]:
        told = coverage(target, self.pairs(target), self.bytes_per_token(target))
        early = {"early_bytes_per_token": self.early_bytes_per_token(target)}
        return {**told, **(early if self.start else {})}


def coded_layout(
    spec: LayerSpec, max_width: int, pair: Pair, codec: Callable[..., Codec], start: int = 0
) -> QuantizedLayout:
    """`codec` makes one of a scheme, a size and a type (`Scheme.codec`)."""
    (keys, values), shape = pair, shape_of(spec)
    of_keys = codec(keys, shape.key_size, shape.dtype)
    of_values = codec(values, shape.value_size, shape.dtype)
    if start:
        return DelayedLayout(spec, max_width, of_keys, of_values, start)
    return QuantizedLayout(spec, max_width, of_keys, of_values)


def coded_bytes(shape: Shape, keys: Scheme, values: Scheme) -> float:
    """Bytes a token takes in a layer whose keys and values are coded so."""
    key_bytes = keys.vector_bytes(shape.key_size, shape.item_bytes)
    return shape.heads * (key_bytes + values.vector_bytes(shape.value_size, shape.item_bytes))


def all_coded(target: Target, keys: Scheme, values: Scheme) -> dict[int, Pair]:
    """Every full and sliding layer, alike."""
    return {i: (keys, values) for i, spec in enumerate(target.specs) if spec.codable}


def checked(scheme: Scheme) -> Scheme:
    """ValueError, which `build` puts under its path, for bits and groups without a kernel."""
    if said := scheme.refusal():
        raise ValueError(said)
    return scheme


def refuse_misfits(target: Target, pairs: Mapping[int, Pair], asks: bool) -> None:
    """OpenError naming the layers whose heads cannot be coded, or a model whose attention is code of
    its own although the policy must be asked: to turn vectors, or (`asks`) to choose among them."""
    bad: dict[str, list[int]] = {}
    for layer, (keys, values) in pairs.items():
        shape = shape_of(target.specs[layer])
        for scheme, size in {(keys, shape.key_size), (values, shape.value_size)}:
            if said := scheme.misfit(size):
                bad.setdefault(f"heads of {size} {said}", []).append(layer)
    if bad:
        said = "; ".join(f"{why}, in layers {sorted(set(layers))}" for why, layers in bad.items())
        raise OpenError(f"kv: {target.name}: {said}. Choose another group_size or kv=native.")
    turned = any(scheme.rotation for pair in pairs.values() for scheme in pair)
    if (turned or asks) and "attend" not in target.can:
        raise OpenError(
            f"kv: {target.name} computes attention by code of its own, which reads plain keys and "
            f"values only. Use a policy without rotation, and start=0: kv8, kv4, per_layer, native."
        )
