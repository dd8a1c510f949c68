"""Small random drafter checkpoints that fit the `tiny` targets: mostly wrong, in the real layout.

`tiny_checkpoint(kind, folder)` writes one and returns the overrides that choose target and drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.drafters.neural.block import block_shapes, gemma_norms, head_norms

HIDDEN, VOCAB, LAYERS = 64, 279, 4  # of `model=tiny model.family=llama`
LAYER: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}

Shapes = dict[str, tuple[int, ...]]


def tiny_checkpoint(kind: str, folder: Path) -> tuple[str, ...]:
    return TINY[kind](folder)


def write(folder: Path, config: Mapping[str, Any], shapes: Shapes, seed: int = 0) -> Path:
    """Random tensors; norms near 1, matrices of a gain that keeps states moving."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    random = np.random.default_rng(seed)
    tensors = {name: mx.array(_random(random, name, shapes[name])) for name in sorted(shapes)}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def _random(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = random.standard_normal(shape, np.float32)
    if name == "d2t":
        return np.arange(shape[0], dtype=np.int64) % 2
    if "norm" in name or "scalar" in name:
        return 1 + 0.1 * noise
    return noise * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.1)


def eagle3(folder: Path) -> tuple[str, ...]:
    """SafeAILab's dialect with a smaller vocabulary, the target's embedding shared."""
    shapes = block_shapes("midlayer.", HIDDEN, 96, 16, 4, 2, wide=2) | {
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (200, HIDDEN),
        "d2t": (200,),
    }
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200}
    write(folder / "eagle3", config, shapes)
    return "model.family=llama", "drafter=eagle3", f"drafter.path={folder / 'eagle3'}"


TINY: dict[str, Callable[[Path], tuple[str, ...]]] = {"eagle3": eagle3}
_ = (gemma_norms, head_norms)
