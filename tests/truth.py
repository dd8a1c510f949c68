"""States whose arrays are made of hashes of the token prefix, so that any wrong sharing shows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq

import mlx.core as mx
import numpy as np

from pipeline.types import Attachment, LayerSlice, LayerSpec, Segment, State
from stages.rows.state import exact_layers, held_from, layer_range, since

HEADS, DIM = 2, 3


def value(layer: int, name: str, prefix: Seq[int]) -> float:
    """What layer `layer` computes at the last token of `prefix`: depends on all of it."""
    return float(zlib.crc32(repr((layer, name, tuple(prefix))).encode()) % (1 << 20))


def kv(layer: int, name: str, tokens: Seq[int], first: int, stop: int) -> np.ndarray:
    """True array (heads, stop - first, dim) of a layer."""
    row = np.array([value(layer, name, tokens[: p + 1]) for p in range(first, stop)], np.float32)
    ramp = np.arange(HEADS * DIM, dtype=np.float32).reshape(HEADS, 1, DIM)
    return row.reshape(1, -1, 1) + ramp


def exact_payload(layer: int, tokens: Seq[int]) -> dict[str, mx.array]:
    """True payload of a layer that cannot be cut."""
    return {"state": mx.array([value(layer, "state", tokens)], mx.float32)}


def capture(
    specs: Seq[LayerSpec],
    tokens: Seq[int],
    namespace: str = "n",
    *,
    start: int = 0,
    cuts: Seq[int] = (),
    slack: int = 0,
    attachments: Seq[Attachment] = (),
    min_reuse: int = 0,
) -> State:
    """What rows would capture: full layers from `start`, windows plus `slack` back from each segment's
    end, boundary payloads at each of them. `cuts`: ends of the segments before the last."""
    stops = [*cuts, len(tokens)]
    starts = [start, *cuts]
    segments = [_segment(specs, tokens, a, b, slack) for a, b in zip(starts, stops, strict=True)]
    exact = [i for i, spec in enumerate(specs) if spec.kind == "recurrent"]
    boundaries = (
        {b: {i: exact_payload(i, tokens[:b]) for i in exact} for b in stops} if exact else {}
    )
    return State(
        tokens=tuple(tokens),
        namespace=namespace,
        specs=tuple(specs),
        segments=tuple(segments),
        boundaries=boundaries,
        attachments=attachments,
        min_reuse=min_reuse,
    )


def _segment(specs: Seq[LayerSpec], tokens: Seq[int], start: int, stop: int, slack: int) -> Segment:
    layers: list[LayerSlice | None] = []
    for layer, spec in enumerate(specs):
        if spec.kind == "recurrent":
            layers.append(None)
            continue
        first = max(0, since(spec, stop) - slack) if spec.kind == "sliding" else start
        arrays = {n: mx.array(kv(layer, n, tokens, first, stop)) for n in ("keys", "values")}
        mx.eval(arrays)
        layers.append(LayerSlice(first, arrays if first < stop else {}))
    return Segment(start, stop, tuple(layers))


def assert_true(state: State) -> None:
    """Everything a model needs to go on after the state's tokens is there and is theirs."""
    length = len(state.tokens)
    exact = exact_layers(state)
    for layer, spec in enumerate(state.specs):
        if layer in exact:
            mine = state.boundaries[length][layer]["state"]
            assert float(mine[0]) == value(layer, "state", state.tokens)
            continue
        first = held_from(state.segments, layer, length)
        assert first <= since(spec, length), f"layer {layer} begins at {first} of {length}"
        arrays = layer_range(state, layer, first, length)
        for name, array in arrays.items():
            np.testing.assert_array_equal(
                np.array(array), kv(layer, name, state.tokens, first, length)
            )
        assert first == length or set(arrays) == {"keys", "values"}


FULL = LayerSpec("full")
HYBRID = LayerSpec("recurrent")


def window(tokens: int) -> LayerSpec:
    """A sliding layer."""
    return LayerSpec("sliding", tokens)


MIXES = {
    "full": (FULL, FULL),
    "windows": (window(4), FULL, window(7)),
    "only windows": (window(1), window(3)),
    "hybrid": (FULL, HYBRID),
    "everything": (window(5), HYBRID, FULL),
    "recurrent": (HYBRID,),
}
