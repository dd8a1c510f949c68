"""What a checkpoint's numbers become on this device.

Why: MLX's CPU backend sends only float32 products to BLAS. A 4-bit model decodes at 10 tokens/s
with float32 scales, at 1.9 with bfloat16 scales and at 0.2 with float16 scales.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from pipeline.types import Device


def settle(model: nn.Module, device: Device) -> list[str]:
    """Bring the weights into the form the device wants; sentences saying what was done."""
    if device.kind != "cpu":
        return []
    packed = any(hasattr(module, "bits") for module in model.modules())
    if device.weights == "float32":
        return _float32(model, packed)
    if not packed:
        return []
    return _cast(model, "The scales of quantized weights")


def _float32(model: nn.Module, packed: bool) -> list[str]:
    notes = []
    if packed:
        from mlx_lm.utils import dequantize_model

        _cast(model, "")  # first, so that nothing is rounded to 16 bits on the way
        dequantize_model(model)
        notes.append("Quantized weights were dequantized to float32 (device.weights=float32).")
    return notes + _cast(model, "The weights")


def _cast(model: nn.Module, what: str) -> list[str]:
    """Every floating array of the model to float32."""
    low = [array for _, array in tree_flatten(model.parameters()) if _low(array)]
    found = {str(array.dtype).removeprefix("mlx.core.") for array in low}
    if not found:
        return []
    model.update(tree_map(lambda a: a.astype(mx.float32) if _low(a) else a, model.parameters()))
    return [f"{what} were cast from {' and '.join(sorted(found))} to float32."]


def lay_out(model: nn.Module, device: Device) -> list[str]:
    """Where only the wheel's reference BLAS is there, keep float32 matrices so that their transpose
    is contiguous: one to four rows then take 0.4 to 0.9 of the time (measured, SmolLM2's shapes)."""
    if device.kind != "cpu" or device.describe().get("blas") != "reference":
        return []
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype == mx.float32:
            turned = mx.contiguous(module.weight.T)
            mx.eval(turned)  # one matrix at a time: the old one is freed before the next
            module.weight = turned.T
    return ["Matrices are stored transposed, for MLX's reference BLAS (no faster one was found)."]


def _low(array: mx.array) -> bool:
    return array.dtype in (mx.float16, mx.bfloat16)
