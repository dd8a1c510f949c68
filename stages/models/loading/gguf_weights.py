"""Weights of a GGUF file under mlx-lm's names, as float32 or still packed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from pipeline.errors import OpenError
from stages.models.loading.gguf_archs import Architecture
from stages.models.loading.gguf_quants import dequantize
from stages.models.loading.gguf_reader import GGUFFile

Weights = dict[str, mx.array]
PACKED = frozenset({"Q4_0", "Q4_1", "Q8_0"})  # what mx.load turns into MLX's own packed form
PLAIN = frozenset({"F16", "F32"})
GROUP = 32  # elements that share a scale in all of them


def float_weights(file: GGUFFile) -> Weights:
    """Everything as float32, under GGUF's names."""
    return {name: mx.array(dequantize(file, name)) for name in file.tensors}


def packed_weights(file: GGUFFile) -> Weights:
    """MLX's affine triples `x.weight`, `x.scales`, `x.biases`, under GGUF's names."""
    weights = mx.load(str(file.path), format="gguf")
    assert isinstance(weights, dict)
    return weights


def can_stay_packed(file: GGUFFile) -> bool:
    return file.types <= PACKED | PLAIN


def build(arch: Architecture, config: dict[str, Any], weights: Weights) -> nn.Module:
    """An mlx-lm model holding these weights."""
    from importlib import import_module

    module = import_module(f"mlx_lm.models.{arch.module}")
    args = module.ModelArgs.from_dict(config)
    model = module.Model(args)
    renamed = rename(arch, config, weights)
    if hasattr(model, "sanitize"):
        renamed = model.sanitize(renamed)
    if any(name.endswith(".scales") for name in renamed):
        nn.quantize(model, class_predicate=lambda path, layer: _packing(path, layer, renamed))
    model.eval()
    model.load_weights(list(renamed.items()), strict=True)
    return model


def _packing(path: str, layer: nn.Module, weights: Weights) -> bool | dict[str, int]:
    if f"{path}.scales" not in weights:
        return False
    words, groups = (weights[f"{path}.{leaf}"].shape[1] for leaf in ("weight", "scales"))
    return {"group_size": GROUP, "bits": words * 32 // (groups * GROUP)}


def rename(arch: Architecture, config: dict[str, Any], weights: Weights) -> Weights:
    """mlx-lm's names, row order and norm convention. OpenError lists tensors nobody would read."""
    names = {name: arch.rename(name) for name in weights}
    if unknown := sorted(name for name, new in names.items() if new is None):
        raise OpenError(
            f"{len(unknown)} tensors of the file are unknown to {arch.module}: {unknown[:5]}"
        )
    return {str(names[name]): _mend(arch, config, name, array) for name, array in weights.items()}


def _mend(arch: Architecture, config: dict[str, Any], name: str, array: mx.array) -> mx.array:
    part = name.split(".")[-2]
    if arch.interleaved and part in ("attn_q", "attn_k"):
        heads = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        return deinterleave(array, config[heads])
    return array - arch.norm_offset if arch.norm_offset and part.endswith("norm") else array


def deinterleave(rows: mx.array, heads: int) -> mx.array:
    """Per head, rows stored as (pair, half) back to (half, pair), as mlx-lm's rotary wants them.
    Rows are whole in packed weights, scales and biases too, so the same move serves all."""
    shape = rows.shape
    return rows.reshape(heads, shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(shape)
