"""What of a state goes into which file (owner thread: lazy arrays), and a state made from files again.

Layers that can be cut by tokens go into runs. Windows and layers that cannot be cut go, whole, into the
boundary of the state's length, so such a state is usable at lengths that were captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import mlx.core as mx

from pipeline.types import Attachment, LayerSlice, LayerSpec, Segment, State
from stages.rows.state import evaluate, exact_layers, layer_range, since
from stages.tiers.radix import WORD
from stages.tiers.saved import format as form
from stages.tiers.saved.payload import HostArray, map_arrays

RunLayers = Mapping[int, Mapping[str, Any]]


def is_window(spec: LayerSpec) -> bool:
    return bool(spec.window)


def is_cuttable(state: State) -> bool:
    """Whether the state can be cut at any length from its runs alone."""
    return not exact_layers(state) and not any(map(is_window, state.specs))


def run_payload(state: State, start: int, stop: int) -> RunLayers:
    """layer -> name -> (heads, stop - start, dim) of the layers that can be cut by tokens. Lazy."""
    exact = exact_layers(state)
    whole = (i for i, spec in enumerate(state.specs) if i not in exact and not is_window(spec))
    return {layer: layer_range(state, layer, start, stop) for layer in whole}


def boundary_payload(state: State) -> Mapping[str, Any]:
    """Windows (layer -> [first, arrays]) and exact payloads at the state's length. Lazy."""
    stop, exact = len(state.tokens), exact_layers(state)
    windows = {}
    for layer, spec in enumerate(state.specs):
        if layer not in exact and is_window(spec):
            first = since(spec, stop)
            windows[layer] = [first, layer_range(state, layer, first, stop)]
    return {"windows": windows, "exact": dict(state.boundaries.get(stop, {}))}


def attachment_payload(attachment: Attachment) -> Mapping[str, Any]:
    return {
        "schema": attachment.schema,
        "metadata": dict(attachment.metadata),
        "tensors": list(attachment.tensors),
    }


def files(
    state: State, key: bytes, held: int, parent: str, step: int
) -> Iterator[tuple[form.Header, Any]]:
    """Header and payload of each file that a state makes: runs of `step` tokens for what is not held,
    after the file `parent`, then what hangs at its end. `key`: its packed token ids."""
    length, cuttable = len(state.tokens), is_cuttable(state)
    sha = sha256(f"headrace:{form.FORMAT}:{state.namespace}:".encode() + key[: held * WORD])
    base = form.Header(
        "run", state.namespace, parent, held, held, b"", sha.hexdigest(), state.specs, cuttable,
        state.min_reuse,
    )  # fmt: skip
    for start in range(held, length, step):
        stop = min(length, start + step)
        ids = key[start * WORD : stop * WORD]
        sha.update(ids)
        base = replace(base, start=start, stop=stop, key=ids, chain=sha.hexdigest())
        yield base, run_payload(state, start, stop)
        base = replace(base, parent=base.name)
    end = replace(base, start=length, key=b"", chain=sha.hexdigest(), stop=length)
    if not cuttable:
        yield replace(end, kind="boundary"), boundary_payload(state)
    for each in state.attachments:
        note = replace(end, kind="attachment", label=each.namespace)
        yield note, attachment_payload(each)


@dataclass
class Pieces:
    """What was read for one state; arrays on the host or, if not yet written, on the device."""

    tokens: tuple[int, ...]
    namespace: str
    specs: tuple[LayerSpec, ...]
    min_reuse: int = 0
    runs: list[tuple[int, int, int, RunLayers]] = field(default_factory=list)
    boundary: Mapping[str, Any] | None = None
    attachments: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def state(self) -> State:
        """Evaluated arrays of its own. `runs` are (start, stop, start of the file, layers)."""
        boundary = map_arrays(self.boundary, on_device) if self.boundary else {}
        exact, windows = boundary.get("exact", {}), boundary.get("windows", {})
        segments = [self._segment(at, windows) for at in range(len(self.runs))]
        state = State(
            tokens=self.tokens,
            namespace=self.namespace,
            specs=self.specs,
            segments=tuple(segments),
            boundaries={len(self.tokens): exact} if exact else {},
            attachments=tuple(_attachment(*each) for each in self.attachments),
            min_reuse=self.min_reuse,
        )
        evaluate(segments)
        mx.eval(state.boundaries)
        return state

    def _segment(self, index: int, windows: Mapping[int, Any]) -> Segment:
        start, stop, origin, layers = self.runs[index]
        last = index == len(self.runs) - 1
        slices: list[LayerSlice | None] = []
        for layer in range(len(self.specs)):
            if layer in layers:
                arrays = layers[layer].items()
                mine = {n: on_device(part(a, start - origin, stop - origin)) for n, a in arrays}
                slices.append(LayerSlice(start, mine))
            elif layer in windows:
                first, held = windows[layer] if last else (stop, {})
                slices.append(LayerSlice(first, held))
            else:
                slices.append(None)
        return Segment(start, stop, tuple(slices))


def _attachment(namespace: str, payload: Mapping[str, Any]) -> Attachment:
    tensors = tuple(map(on_device, payload["tensors"]))
    mx.eval(tensors)
    return Attachment(namespace, payload["schema"], payload["metadata"], tensors)


def on_device(array: Any) -> Any:
    return array.to_device() if isinstance(array, HostArray) else array


def part(array: Any, low: int, high: int) -> Any:
    """Tokens [low, high) of (heads, tokens, dim)."""
    if low == 0 and high == array_tokens(array):
        return array
    return array.tokens(low, high) if isinstance(array, HostArray) else array[:, low:high]


def array_tokens(array: Any) -> int:
    return int((array.data if isinstance(array, HostArray) else array).shape[1])


def same_attachment(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two attachment payloads say the same, their arrays judged by shape."""
    shapes = ([tuple(x.shape) for x in each["tensors"]] for each in (a, b))
    return (a["schema"], a["metadata"], next(shapes)) == (b["schema"], b["metadata"], next(shapes))
