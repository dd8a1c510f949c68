"""Pure functions on saved state: how far it can be used, cutting, joining, reading, checking.

Why one module: rows, tiers and drafters must agree on what a state covers. A layer's tokens are the
union of its slices' [first, segment.stop); a full layer must have every token, a windowed layer may
have holes. The query at position L of a layer with window W attends L-W+1..L, so a state of length L
needs that layer's tokens [max(0, L-W+1), L). Layers that cannot be cut (`None` in a segment) need a
boundary payload exactly at L. Arrays are (heads, tokens, dim). Owner thread, because arrays may be lazy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import mlx.core as mx

from pipeline.types import LayerSlice, LayerSpec, Segment, State
from stages.rows.blocks import Pages

TOKENS = 1  # axis
EXACT = frozenset({"recurrent", "sinks"})  # kinds whose state is that of one length


def is_exact(spec: LayerSpec) -> bool:
    """Whether the layer cannot be cut by tokens."""
    return spec.kind in EXACT


def since(spec: LayerSpec, length: int) -> int:
    """First token that a state of `length` tokens needs in a layer that can be cut. A chunk's tokens
    lie within a window of its size."""
    return max(0, length - spec.window + 1) if spec.window else 0


def cuttable(segments: Seq[Segment]) -> list[int]:
    """Layers that are stored by tokens."""
    return (
        [i for i, piece in enumerate(segments[0].layers) if piece is not None] if segments else []
    )


def exact_layers(state: State) -> frozenset[int]:
    """Layers that cannot be cut: they have a payload at exact lengths only."""
    return frozenset(i for i, piece in enumerate(state.segments[0].layers) if piece is None)


def pieces(segments: Seq[Segment], layer: int, stop: int) -> Iterator[tuple[int, int, LayerSlice]]:
    """(from, to, slice) of `layer` going back from `stop`, without a gap, as far as they reach.

    One pass is enough: stops fall, so a slice that did not help at a later position never helps.
    """
    for segment in reversed(segments):
        piece = segment.layers[layer]
        assert piece is not None, f"layer {layer} cannot be cut"
        if segment.stop < stop:
            return
        if piece.first < stop:
            yield piece.first, stop, piece
            stop = piece.first


def held_from(segments: Seq[Segment], layer: int, stop: int, floor: int = 0) -> int:
    """Smallest p with every token of [p, stop) in `layer`; not searched below `floor`."""
    reached = stop
    for reached, _, _ in pieces(segments, layer, stop):
        if reached <= floor:
            break
    return reached


def covered_len(
    specs: Seq[LayerSpec], segments: Seq[Segment], layers: Iterable[int], limit: int
) -> int:
    """Longest L <= limit at which each of `layers` has what it needs, looking at each once; the
    caller repeats until nothing changes."""
    for layer in layers:
        need = since(specs[layer], limit)
        while (reached := held_from(segments, layer, limit, need)) > need:
            limit = max(
                (s.stop for s in segments if s.stop < reached and not _empty(s, layer)), default=0
            )
            need = since(specs[layer], limit)
    return limit


def usable_len(
    specs: Seq[LayerSpec],
    segments: Seq[Segment],
    limit: int,
    boundaries: Collection[int] = (),
    min_reuse: int = 0,
    layers: Collection[int] | None = None,
) -> int:
    """Longest length <= limit from which a model can go on, 0 if there is none.

    `boundaries`: lengths that have the payload of the layers that cannot be cut. `layers`: look only
    at these (a caller that knows that the others are complete).
    """
    if not segments or segments[0].start > 0:
        return 0
    cut_layers = cuttable(segments)
    exact = len(cut_layers) < len(specs)
    looked = cut_layers if layers is None else layers
    length, before = min(limit, segments[-1].stop), -1
    while length != before and length > 0:
        before, length = length, covered_len(specs, segments, looked, length)
        if exact:
            length = max((at for at in boundaries if at <= length), default=0)
    return length if length >= max(min_reuse, 1) else 0


def state_usable(state: State, limit: int) -> int:
    """`usable_len` of a state."""
    return usable_len(state.specs, state.segments, limit, tuple(state.boundaries), state.min_reuse)


def cut(state: State, length: int) -> State:
    """The state's first `length` tokens. Arrays may be lazy views: for joining rows at once.
    Attachments stay only at their exact length. AssertionError where it cannot be cut there."""
    if length == len(state.tokens):
        return state
    usable = state_usable(state, length)
    assert usable == length, (
        f"cannot cut {len(state.tokens)} tokens to {length}: usable are {usable}"
    )
    kept = [segment for segment in state.segments if segment.stop < length]
    start = kept[-1].stop if kept else state.segments[0].start
    return replace(
        state,
        tokens=state.tokens[:length],
        segments=(*kept, cut_range(state.segments, start, length)),
        boundaries={at: payload for at, payload in state.boundaries.items() if at <= length},
        attachments=(),
    )


def cut_range(segments: Seq[Segment], start: int, stop: int) -> Segment:
    """One segment for [start, stop) with each layer's longest run of tokens that ends at `stop`,
    as lazy views. Window payloads stay as long as they are."""
    layers = (longest(segments, layer, stop) for layer in range(len(segments[0].layers)))
    return Segment(start, stop, tuple(layers))


def longest(segments: Seq[Segment], layer: int, stop: int) -> LayerSlice | None:
    """The one stored slice that reaches furthest back from `stop`, as a lazy view up to `stop`;
    an empty slice if none holds token stop - 1; None for a layer that cannot be cut."""
    best: LayerSlice | None = None
    for segment in reversed(segments):
        piece = segment.layers[layer]
        if piece is None or segment.stop < stop:
            break
        if piece.first < (best.first if best else stop):
            best = piece
    if best is not None:
        return view(best, best.first, stop)
    return None if segments[0].layers[layer] is None else LayerSlice(stop, {})


def view(piece: LayerSlice, start: int, stop: int) -> LayerSlice:
    """Tokens [start, stop) of a slice that holds them; lazy, and pins the slice's arrays."""
    low, high = start - piece.first, stop - piece.first
    return LayerSlice(
        start, {name: _part(array, low, high) for name, array in piece.arrays.items()}
    )


def compact(piece: LayerSlice | None, start: int, stop: int) -> LayerSlice | None:
    """Tokens [max(start, first), stop) of a slice as arrays of their own; evaluate them."""
    if piece is None or piece.first >= stop or not piece.arrays:
        return None if piece is None else LayerSlice(stop, {})
    first = max(start, piece.first)
    part = view(piece, first, stop)
    return LayerSlice(first, {name: owned(array) for name, array in part.arrays.items()})


def owned(array: Any) -> Any:
    """A lazy copy (heads, tokens, dim) that shares no buffer; of blocks, references of its own.
    `mx.contiguous` shares where a slice of one head leaves out less than 16 KiB, which pins a batch
    and makes its next write a copy."""
    if isinstance(array, Pages):
        return array.owned()
    return mx.concatenate([array, array[:, :0]], axis=TOKENS)


def plain(array: Any) -> Any:
    """An array of a state as a device array: blocks are copied out of their pool."""
    return array.dense() if isinstance(array, Pages) else array


def materialize(segment: Segment) -> Segment:
    """The same segment with evaluated arrays of its own: what a capture must hand out."""
    mine = tuple(compact(piece, 0, segment.stop) for piece in segment.layers)
    copy = Segment(segment.start, segment.stop, mine)
    evaluate([copy])
    return copy


def split(segment: Segment, at: int) -> tuple[Segment, Segment]:
    """[start, at) and [at, stop) as compact evaluated copies, so that neither pins the other."""
    assert segment.start < at < segment.stop, (
        f"{at} is not inside [{segment.start}, {segment.stop})"
    )
    left = tuple(compact(piece, 0, at) for piece in segment.layers)
    right = tuple(compact(piece, at, segment.stop) for piece in segment.layers)
    halves = Segment(segment.start, at, left), Segment(at, segment.stop, right)
    evaluate(halves)
    return halves


def join(base: State, tail: State) -> State:
    """A whole state from a base and a partial state whose segments begin inside or at its end.
    AssertionError unless namespace, specs and tokens agree."""
    start = tail.segments[0].start
    assert base.namespace == tail.namespace and base.specs == tail.specs, (
        "states of different namespaces"
    )
    assert start <= len(base.tokens) and base.tokens[:start] == tail.tokens[:start], (
        f"base holds {len(base.tokens)} tokens, the rest begins at {start}"
    )
    front = _front(base.segments, start)
    early = {at: payload for at, payload in base.boundaries.items() if at <= start}
    return replace(tail, segments=(*front, *tail.segments), boundaries={**early, **tail.boundaries})


def layer_range(state: State, layer: int, first: int, stop: int, room: int = 0) -> dict[str, Any]:
    """name -> array (heads, stop - first + room, dim) of a layer's tokens [first, stop), then `room`
    zeros; {} if there are no tokens. A single fitting slice without room is returned as it is, and
    nothing is copied twice. AssertionError on a hole."""
    parts: list[LayerSlice] = []
    reached = stop
    for low, high, piece in pieces(state.segments, layer, stop):
        if reached <= first:
            break
        reached = max(low, first)
        parts.append(view(piece, reached, high))
    assert reached <= first, f"layer {layer} lacks tokens [{first}, {reached}) of [{first}, {stop})"
    return _concatenate(parts[::-1], room)


def evaluate(segments: Iterable[Segment]) -> None:
    """Materialize all arrays in one go; evaluated arrays may cross threads."""
    slices = [piece for segment in segments for piece in segment.layers if piece]
    mx.eval([a for piece in slices for a in piece.arrays.values() if not isinstance(a, Pages)])


def nbytes(segment: Segment) -> int:
    """Bytes of all arrays of a segment."""
    return sum(payload_bytes(piece.arrays) for piece in segment.layers if piece is not None)


def payload_bytes(payload: Any) -> int:
    """Bytes of the arrays in nested mappings and sequences; 0 for anything else."""
    if hasattr(payload, "nbytes"):
        return int(payload.nbytes)
    if isinstance(payload, Mapping):
        return sum(map(payload_bytes, payload.values()))
    return sum(map(payload_bytes, payload)) if isinstance(payload, list | tuple) else 0


def state_bytes(state: State) -> int:
    """Bytes of all arrays of a state, boundaries and attachments included."""
    extra = payload_bytes(state.boundaries) + payload_bytes([a.tensors for a in state.attachments])
    return sum(map(nbytes, state.segments)) + extra


def check(state: State) -> None:
    """AssertionError with the numbers where the state breaks its contract. Looks at shapes only."""
    assert state.segments, "a state without segments"
    at = state.segments[0].start
    for segment in state.segments:
        assert segment.start == at <= segment.stop, (
            f"segment [{segment.start}, {segment.stop}) after {at}"
        )
        check_segment(state.specs, segment, segment.start)
        at = segment.stop
    assert at == len(state.tokens), f"{len(state.tokens)} tokens, segments end at {at}"
    _check_boundaries(state)


def check_segment(specs: Seq[LayerSpec], segment: Segment, start: int) -> None:
    """Every slice has the length it claims and every full layer reaches back to `start`."""
    assert len(segment.layers) == len(specs), f"{len(segment.layers)} layers for {len(specs)} specs"
    for layer, (spec, piece) in enumerate(zip(specs, segment.layers, strict=True)):
        if piece is None:
            continue
        count = segment.stop - piece.first
        lengths = {name: array.shape[TOKENS] for name, array in piece.arrays.items()}
        assert count >= 0 and set(lengths.values()) <= {count}, (
            f"layer {layer}: {lengths}, not {count}"
        )
        assert lengths or not count, f"layer {layer}: no arrays for {count} tokens"
        whole = spec.window or segment.start == segment.stop or piece.first <= start
        assert whole, f"layer {layer} ({spec.kind}) begins at {piece.first}, not {start}"


def _check_boundaries(state: State) -> None:
    kinds = {tuple(piece is None for piece in segment.layers) for segment in state.segments}
    assert len(kinds) == 1, "segments disagree on which layers can be cut"
    exact = {layer for layer, never in enumerate(kinds.pop()) if never}
    length = len(state.tokens)
    assert not exact or length in state.boundaries, (
        f"layers {sorted(exact)} have no payload at {length}"
    )
    for at, payload in state.boundaries.items():
        assert state.segments[0].start <= at <= length, f"a boundary at {at} of {length}"
        assert set(payload) == exact, (
            f"boundary {at} is of layers {sorted(payload)}, not {sorted(exact)}"
        )


def _empty(segment: Segment, layer: int) -> bool:
    piece = segment.layers[layer]
    return piece is None or piece.first >= segment.stop


def _front(segments: Seq[Segment], stop: int) -> tuple[Segment, ...]:
    kept = tuple(segment for segment in segments if segment.stop <= stop)
    start = kept[-1].stop if kept else 0
    return kept if start == stop else (*kept, cut_range(segments, start, stop))


def _part(array: Any, low: int, high: int) -> Any:
    return array if low == 0 and high == array.shape[TOKENS] else array[:, low:high]


def _concatenate(parts: Seq[LayerSlice], room: int) -> dict[str, Any]:
    if not parts:
        return {}
    if len(parts) == 1 and not room:
        return dict(parts[0].arrays)
    return {
        name: mx.concatenate(
            [*(plain(p.arrays[name]) for p in parts), _empty_slots(array, room)], TOKENS
        )
        for name, array in parts[0].arrays.items()
    }


def _empty_slots(like: Any, count: int) -> Any:
    return mx.zeros((like.shape[0], count, *like.shape[2:]), like.dtype)
