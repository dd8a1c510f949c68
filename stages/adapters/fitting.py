"""From what a folder says to what the model's layers add; every mismatch with both sides' numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pipeline.errors import nearest
from stages.adapters.folder import Reading, Tensors
from stages.adapters.layer import Delta

LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+)$")  # a name from its layer's number on
SHOWN = 12  # problems of one folder that are told; a wrong base has hundreds
LOW = (mx.float16, mx.bfloat16)


def fitted(
    reading: Reading, modules: Mapping[str, Any], scale: float, *, widen: bool
) -> tuple[dict[str, Delta], list[str]]:
    """Deltas by the model's own names, and what keeps them from fitting. `widen`: 16-bit numbers become
    float32, the only ones whose products are quick on a CPU."""
    deltas: dict[str, Delta] = {}
    problems: list[str] = []
    if len(reading.modules) > len(modules):
        return {}, [f"it changes {len(reading.modules):,} modules; the model has {len(modules):,}"]
    for said, tensors in reading.modules.items():
        path = _path(said, modules)
        wrong = list(_misfits(said, path, tensors, modules, hints=len(problems) < SHOWN))
        if not wrong and path in deltas:
            wrong = [f"{said}: {path} has one already"]
        problems += wrong
        if not wrong:
            deltas[path] = _delta(modules[path], tensors, scale, widen)
    return deltas, problems


def digest_of(deltas: Mapping[str, Delta]) -> str:
    """SHA-256 (hex, 32 digits) over everything that is added, scale included; names of files and of
    formats are not in it."""
    sha = hashlib.sha256()
    for path, delta in sorted(deltas.items()):
        for name, array in vars(delta).items():
            if array is not None:
                sha.update(f"\n{path} {name} {array.shape} {array.dtype}\n".encode())
                sha.update(np.asarray(mx.contiguous(array).view(mx.uint8)).data)
    return sha.hexdigest()[:32]


def _path(said: str, modules: Mapping[str, Any]) -> str:
    """The model's name for it: the same, or the only one that is alike from the layer's number on."""
    if said in modules or not (found := LAYER.search(said)):
        return said
    alike = [path for path in modules if path.endswith(f".{found[1]}") or path == found[1]]
    return alike[0] if len(alike) == 1 else said


def _misfits(
    said: str, path: str, tensors: Tensors, modules: Mapping[str, Any], *, hints: bool
) -> Iterator[str]:
    """`hints`: a name that is like another is looked for, which takes a while in a large model."""
    module = modules.get(path)
    if module is None:
        hint = _near(said, modules) if hints else ""
        yield f"{said}: the model has no such module. {hint}".strip()
        return
    if not LAYER.search(path):
        yield f"{said}: only modules of the decoder's layers can have adapters, not embedding and head"
        return
    if not isinstance(module, nn.Linear | nn.QuantizedLinear):
        kind = type(module).__name__
        yield f"{said}: a {kind} is no linear layer whose rows are apart, so it cannot have adapters"
        return
    assert tensors.a_DR is not None and tensors.b_RO is not None
    takes, gives = tensors.a_DR.shape[0], tensors.b_RO.shape[1]
    outputs, inputs = _shape(module)
    if (takes, gives) != (inputs, outputs):
        yield f"{said}: made for {takes} inputs and {gives} outputs; the model's has {inputs} and {outputs}"
    if tensors.m_O is not None and tensors.m_O.size != outputs:
        yield f"{said}: DoRA's lengths are {tensors.m_O.size}; the model's layer has {outputs} outputs"


def _near(said: str, modules: Mapping[str, Any]) -> str:
    """What the model has in its place: another name, or so many layers."""
    if hint := nearest(said, [path for path, m in modules.items() if not m.children()]):
        return hint
    numbers = [
        int(n) for path in modules for n in re.findall(r"\b(?:layers|h|blocks)\.(\d+)", path)
    ]
    return f"Its layers are 0 to {max(numbers)}." if numbers else ""


def _shape(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, packed or not."""
    outputs, inputs = module.weight.shape
    packed = isinstance(module, nn.QuantizedLinear)
    return outputs, inputs * 32 // module.bits if packed else inputs


def _delta(module: Any, tensors: Tensors, scale: float, widen: bool) -> Delta:
    """Scales go into B, in float32, so that nothing is left to be done in a pass."""
    a, b, m = tensors.a_DR, tensors.b_RO, tensors.m_O
    assert a is not None and b is not None
    kept = mx.float32 if widen and b.dtype in LOW else b.dtype
    a = a.astype(mx.float32) if widen and a.dtype in LOW else a
    scaled_RO = b.astype(mx.float32) * (tensors.scale * scale)
    gain = None
    if m is not None:
        own_OD = _weight(module)
        lengths_O = mx.linalg.norm(own_OD + (a.astype(mx.float32) @ scaled_RO).T, axis=1)
        ratio_O = m.reshape(-1).astype(mx.float32) / lengths_O
        scaled_RO, gain = scaled_RO * ratio_O, ratio_O - 1
    delta = Delta(mx.contiguous(a), mx.contiguous(scaled_RO.astype(kept)), gain)
    mx.eval(delta.arrays)
    return delta


def _weight(module: Any) -> mx.array:
    """float32, (O, D)."""
    if not isinstance(module, nn.QuantizedLinear):
        return module.weight.astype(mx.float32)
    whole: mx.array = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )
    return whole.astype(mx.float32)
