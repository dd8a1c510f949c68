"""Adapter folders as others write them: mlx-lm's and PEFT's. What cannot be done is said, not left out.

mlx-lm (`mlx_lm.lora`): adapter_config.json with `fine_tune_type`, `lora_parameters` {rank, scale}, and
adapters.safetensors with PATH.lora_a (in, rank), PATH.lora_b (rank, out), DoRA's PATH.m (out).
PEFT: adapter_config.json with `peft_type`, `r`, `lora_alpha`, and adapter_model.safetensors with
base_model.model.PATH.lora_A.weight (rank, in), .lora_B.weight (out, rank), .lora_magnitude_vector.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from pipeline.errors import OpenError
from stages.adapters.peft import MOST, ByModule, is_number

CONFIG = "adapter_config.json"
WEIGHTS = {"mlx-lm": "adapters.safetensors", "peft": "adapter_model.safetensors"}
MLX_NAME = re.compile(r"(?P<path>.+)\.(?P<part>lora_a|lora_b|m)")
PEFT_NAME = re.compile(
    r"(base_model\.model\.)?(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)(\.default)?(\.weight)?"
)
LONGEST = 300  # letters of a tensor's name
PARTS = {"lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "m", "lora_a": "a", "lora_b": "b"}
REPLACED = ("pissa", "olora", "corda")  # initializations of PEFT that change the base's own weights

# PEFT's settings that change what is computed, the values that change nothing, and why not others
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "peft_type": (("LORA",), "only LoRA adds a low-rank product that rows can have apart"),
    "bias": (("none",), "it trains the base's biases too, which all rows share"),
    "modules_to_save": ((None, []), "it replaces whole modules, which all rows share"),
    "lora_bias": ((False, None), "its biases are not read"),
    "layer_replication": ((None,), "it changes which layers the model has"),
    "trainable_token_indices": ((None,), "it replaces rows of the embedding, which all rows share"),
    "alora_invocation_tokens": ((None, []), "it begins in mid-prompt (aLoRA)"),
    "use_qalora": ((False, None), "its inputs are pooled (QALoRA)"),
    "target_parameters": ((None, []), "it changes parameters that are no linear layer's weights"),
    "arrow_config": ((None,), "it chooses among adapters by token"),
}


@dataclass
class Tensors:
    """What a folder says of one module."""

    a_DR: mx.array | None = None
    b_RO: mx.array | None = None
    m_O: mx.array | None = None
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return self.a_DR.shape[1] if self.a_DR is not None else 0


@dataclass
class Reading:
    """A folder's content, before any model is looked at. With `problems` it is not to be used."""

    layout: str  # mlx-lm | peft
    modules: dict[str, Tensors] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of the tensors as they are stored; known before they are read."""
        parts = [part for t in self.modules.values() for part in (t.a_DR, t.b_RO, t.m_O)]
        return sum(part.nbytes for part in parts if part is not None)


def adapter_files(folder: Path) -> dict[str, Path]:
    """Config and weights by name; OpenError saying what is not there."""
    if not folder.is_dir():
        raise OpenError(f"there is no folder {folder}.")
    found = [name for name in WEIGHTS.values() if (folder / name).is_file()]
    if not (folder / CONFIG).is_file() or not found:
        wants = f"{CONFIG} and {' or '.join(WEIGHTS.values())}"
        raise OpenError(f"{folder} is no adapter's folder: it lacks one of {wants}.")
    return {name: folder / name for name in (CONFIG, found[0])}


def read(folder: Path) -> Reading:
    """OpenError where nothing can be read; whatever else is wrong is among the problems."""
    config_file, weights_file = adapter_files(folder).values()
    layout = next(name for name, file in WEIGHTS.items() if file == weights_file.name)
    try:
        config = json.loads(config_file.read_text())
        arrays: Any = mx.load(str(weights_file))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds no object")
    except (OSError, ValueError, RuntimeError) as error:
        raise OpenError(f"{folder} cannot be read: {error}") from error
    reading = Reading(layout)
    if layout == "mlx-lm":
        _read_mlx(config, arrays, reading)
    else:
        _read_peft(config, arrays, reading)
    if not reading.problems:
        reading.problems += _incomplete(reading.modules)
    return reading


def _read_mlx(config: Mapping[str, Any], arrays: Mapping[str, mx.array], reading: Reading) -> None:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        what = "it replaces whole matrices, so rows cannot have it apart. Fuse it (mlx_lm.fuse) and serve that"
        reading.problems.append(f"fine_tune_type=full: {what}")
    elif kind not in ("lora", "dora"):
        reading.problems.append(f"fine_tune_type={kind}: only lora and dora are known")
    said = config.get("lora_parameters")
    said = said if isinstance(said, dict) else {}
    if not is_number(said.get("scale")):
        reading.problems.append(f"{CONFIG} states no lora_parameters.scale")
    if reading.problems:
        return
    _collect(arrays, MLX_NAME, reading)
    scale, rank = float(said["scale"]), said.get("rank")
    for path, tensors in reading.modules.items():
        tensors.scale = scale
        if rank is not None and tensors.a_DR is not None and tensors.rank != rank:
            reading.problems.append(f"{path}: of rank {tensors.rank}; {CONFIG} says {rank}")


def _read_peft(config: Mapping[str, Any], arrays: Mapping[str, mx.array], reading: Reading) -> None:
    for name, (neutral, why) in REFUSED.items():
        if name in config and config[name] not in neutral:
            reading.problems.append(f"{name}={config[name]}: {why}")
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(REPLACED):
        why = "its base is not the published model. Save it converted to LoRA"
        reading.problems.append(f"init_lora_weights={start}: {why}")
    ranks = ByModule(config, "r", "rank_pattern", least=1)
    alphas = ByModule(config, "lora_alpha", "alpha_pattern", least=-MOST)
    reading.problems += ranks.problems + alphas.problems
    if reading.problems:
        return
    _collect(arrays, PEFT_NAME, reading)
    for path, tensors in reading.modules.items():
        for name in ("a_DR", "b_RO"):
            if (array := getattr(tensors, name)) is not None:
                setattr(tensors, name, array.T)
        rank = ranks[path]
        tensors.scale = alphas[path] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if tensors.a_DR is not None and tensors.rank != rank:
            reading.problems.append(f"{path}: of rank {tensors.rank}; {CONFIG} says {rank}")


def _collect(arrays: Mapping[str, mx.array], pattern: re.Pattern[str], reading: Reading) -> None:
    for name, array in sorted(arrays.items()):
        found = pattern.fullmatch(name) if len(name) <= LONGEST else None
        if found is None:
            reading.problems.append(f"{name}: not a tensor of LoRA's or DoRA's, {array.shape}")
            continue
        tensors = reading.modules.setdefault(found["path"], Tensors())
        slot = PARTS.get(found["part"], found["part"])
        setattr(tensors, {"a": "a_DR", "b": "b_RO", "m": "m_O"}[slot], array)
    if not reading.modules and not reading.problems:
        reading.problems.append("it holds no tensors, so it would change nothing")


def _incomplete(modules: Mapping[str, Tensors]) -> Iterator[str]:
    for path, tensors in modules.items():
        pair = tensors.a_DR, tensors.b_RO
        if any(array is None or array.ndim != 2 for array in pair):
            shapes = [None if array is None else array.shape for array in pair]
            yield f"{path}: wants two matrices A and B, has {shapes[0]} and {shapes[1]}"
        elif pair[0].shape[1] != pair[1].shape[0]:  # type: ignore[union-attr]
            yield f"{path}: A gives {tensors.rank} numbers, B takes {pair[1].shape[0]}"  # type: ignore[union-attr]
