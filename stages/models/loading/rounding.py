"""Weights rounded to few bits, for a drafter that agrees with its own full weights most of the time.

As in published mixes of low bits, not every matrix bears them: embedding and head keep 8 bits, and below 4
bits only the widening matrices of the MLP (gate and up, most of the weights) go down, the others to
4. Measured on SmolLM2 by greedy agreement: 0.98 at 4 bits, 0.5 at 2 (0.7 and 0.0 if all do).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.types import Device

BITS = (2, 3, 4, 5, 6, 8)
GROUP = 32  # weights in a row that share scale and offset
CLIPPED = (0.0, 0.1, 0.2)  # parts of a group's range that are tried to be cut off at each end


def squeeze(model: nn.Module, bits: int, device: Device) -> list[str]:
    """Round all matrices; on a CPU that wants float32 to the values themselves, else packed."""
    if device.kind == "cpu" and device.weights == "float32":
        for path, layer in model.named_modules():
            if _roundable(layer):
                layer.weight = rounded(layer.weight, _bits(path, bits))
                mx.eval(layer.weight)
    else:

        def choice(path: str, layer: nn.Module) -> bool | dict[str, int]:
            packed = {"group_size": GROUP, "bits": _bits(path, bits)}
            return packed if _roundable(layer) and hasattr(layer, "to_quantized") else False

        nn.quantize(model, class_predicate=choice)
    return [f"Weights were rounded to {bits} bits; embedding and head to {max(bits, 8)}."]


def _bits(path: str, bits: int) -> int:
    if "embed" in path or "lm_head" in path:
        return max(bits, 8)
    return bits if "gate_proj" in path or "up_proj" in path else max(bits, 4)


def _roundable(layer: nn.Module) -> bool:
    weight: Any = getattr(layer, "weight", None)
    if weight is None or weight.ndim < 2 or "conv" in type(layer).__name__.lower():
        return False
    return bool(mx.issubdtype(weight.dtype, mx.floating)) and weight.shape[-1] % GROUP == 0


def rounded(weight: mx.array, bits: int) -> mx.array:
    """The nearest weights of 2^bits evenly spaced values a group of 32: of several ranges, each fitted
    by least squares, the one with the least squared error."""
    x = weight.reshape(-1, GROUP).astype(mx.float32)
    low, span = (
        mx.min(x, 1, keepdims=True),
        mx.max(x, 1, keepdims=True) - mx.min(x, 1, keepdims=True),
    )
    best, least = x, mx.full(low.shape, mx.inf)
    for cut in CLIPPED:
        offset, scale = low + cut * span, (1 - 2 * cut) * span / (2**bits - 1)
        for _ in range(2):
            codes = mx.clip(mx.round((x - offset) / mx.where(scale == 0, 1, scale)), 0, 2**bits - 1)
            value = codes * scale + offset
            error = mx.sum(mx.square(value - x), 1, keepdims=True)
            best, least = mx.where(error < least, value, best), mx.minimum(error, least)
            scale, offset = _fitted(x, codes, scale)
    return best.reshape(weight.shape).astype(weight.dtype)


def _fitted(x: mx.array, codes: mx.array, scale: mx.array) -> tuple[mx.array, mx.array]:
    """Scale and offset that bring codes nearest to x."""
    mean, middle = mx.mean(codes, 1, keepdims=True), mx.mean(x, 1, keepdims=True)
    spread = mx.sum(mx.square(codes - mean), 1, keepdims=True)
    slope = mx.sum((codes - mean) * (x - middle), 1, keepdims=True) / mx.maximum(spread, 1e-9)
    scale = mx.where(spread > 0, slope, scale)
    return scale, middle - scale * mean
