"""A drafter's checkpoint folder, read strictly: every tensor is asked for by name and shape.

Drafter configurations are often copies of the target's with noise in them; what the tensors are is
the truth, so a loader says what it expects and everything that differs is listed at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from pipeline.errors import OpenError
from pipeline.types import Target
from pipeline.types.places import user_path
from stages.models.loading.fingerprint import artifact, user_folder

Shape = tuple[int, ...]
Tensors = dict[str, mx.array]
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass
class Checkpoint:
    """`config.json` and the tensors of every safetensors file, still lazy."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> Shape:
        """The shape of a tensor that tells the family; OpenError if it is not there."""
        if name not in self.tensors:
            raise OpenError(f"{self.folder} holds no tensor '{name}': {self.seen()}")
        return tuple(self.tensors[name].shape)

    def number(self, *keys: str) -> int:
        """The first of these configuration keys that holds a number."""
        value = self.value(*keys)
        if not isinstance(value, int) or isinstance(value, bool):
            raise OpenError(f"{self.folder / 'config.json'}: {' or '.join(keys)} wants a number.")
        return value

    def value(self, *keys: str, default: Any = None) -> Any:
        found = (self.config[key] for key in keys if self.config.get(key) is not None)
        return next(found, default)

    def seen(self) -> str:
        """What is in it, for people."""
        kinds = [*self.config.get("architectures", []), self.config.get("model_type")]
        names = ", ".join(sorted(self.tensors)[:6])
        return f"config says {[k for k in kinds if k]}, tensors are {names}, …"

    def take(
        self,
        expected: Mapping[str, Shape],
        optional: Iterable[str] = (),
        ignored: str = "",
        dtype: mx.Dtype | None = None,
    ) -> Tensors:
        """The expected tensors, floats cast to `dtype`. OpenError lists all that are missing, of
        another shape, or not known (`ignored`: a regular expression of those that may be there)."""
        free = set(optional)
        problems = [
            f"missing {name} {shape}"
            for name, shape in expected.items()
            if name not in self.tensors and name not in free
        ]
        for name, array in sorted(self.tensors.items()):
            shape = tuple(array.shape)
            if name in expected and shape != expected[name]:
                problems.append(f"{name} is {shape}, wants {expected[name]}")
            elif name not in expected and not (ignored and re.fullmatch(ignored, name)):
                problems.append(f"unknown {name} {shape}")
        if problems:
            raise OpenError(
                f"{self.folder}: {len(problems)} tensors do not fit:\n- " + "\n- ".join(problems)
            )
        taken = {name: self.tensors[name] for name in expected if name in self.tensors}
        return {name: _cast(array, dtype) for name, array in taken.items()}

    def identity(self) -> str:
        """Digest of the files' bytes."""
        files = {p.name: p for p in (self.folder / "config.json", *_files(self.folder))}
        return artifact(files, {}, user_folder(None))


def files(place: Path | str | None) -> dict[str, Path]:
    """What is read of a drafter's own folder; nothing where it lies in the target's (None)."""
    if place is None:
        return {}
    folder = user_path(place)
    if not (folder / "config.json").is_file():
        raise OpenError(f"{folder} holds no config.json; it is no drafter's folder.")
    return {path.name: path for path in (folder / "config.json", *_files(folder))}


def read(place: Path | str, prefix: str = "") -> Checkpoint:
    """A folder in Hugging Face's layout; of its tensors only those under `prefix`, which stays.
    Packed weights (`scales`, `biases`) are unpacked: drafters are small."""
    folder = user_path(place)
    files(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = {}
    for path in _files(folder):
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        tensors |= {name: array for name, array in loaded.items() if name.startswith(prefix)}
    if not tensors:
        kind = f" under '{prefix}'" if prefix else ""
        raise OpenError(
            f"{folder} holds no safetensors{kind}. "
            + ("" if prefix else "A pytorch_model.bin has to be converted first.")
        )
    return Checkpoint(folder, config, _unpacked(tensors, config))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _unpacked(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    settings = config.get("quantization") or {}
    for scales in [name for name in tensors if name.endswith(".scales")]:
        name = scales.removesuffix(".scales")
        mine = settings.get(name, settings) if isinstance(settings, Mapping) else {}
        tensors[f"{name}.weight"] = mx.dequantize(
            tensors[f"{name}.weight"],
            tensors.pop(scales),
            tensors.pop(f"{name}.biases", None),
            group_size=mine.get("group_size", 64),
            bits=mine.get("bits", 4),
        )
    return tensors


def _cast(array: mx.array, dtype: mx.Dtype | None) -> mx.array:
    return array.astype(dtype) if dtype is not None and array.dtype in FLOATS else array


def evaluated(tensors: Tensors) -> Tensors:
    """Read from disk now, on the thread that will use them."""
    mx.eval(tensors)
    return tensors


def nbytes(tensors: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in tensors.values())


def fit(place: Path, target: Target, facts: Mapping[str, tuple[Any, Any]]) -> None:
    """OpenError with both sides' numbers of every fact (drafter's, target's) that differs."""
    wrong = [
        f"{name}: the drafter was made for {mine}, {target.name} has {theirs}"
        for name, (mine, theirs) in facts.items()
        if mine is not None and mine != theirs
    ]
    if wrong:
        raise OpenError(f"{place} is no drafter for {target.name}:\n- " + "\n- ".join(wrong))


def dtype_of(target: Target) -> mx.Dtype:
    """What the target computes in; the drafter does likewise."""
    embedded: mx.array = target.embed(mx.zeros((1, 1), mx.int32))
    return embedded.dtype


def without_copies(tensors: Tensors, target: Target, scale: float = 1.0) -> Tensors:
    """The tensors less an embedding or a head that only repeats the target's, which is used then.
    64 tokens and 4 states, spread over the vocabulary, decide."""
    kept = dict(tensors)
    embedding, head = kept.get("embed_tokens.weight"), kept.get("lm_head.weight")
    ids = mx.linspace(0, target.vocab_size - 1, 64).astype(mx.int32)[None]
    if embedding is not None and _close(embedding[ids] * scale, target.embed(ids)):
        del kept["embed_tokens.weight"]
    states = mx.random.normal((1, 4, target.hidden_size), key=mx.random.key(0))
    if head is not None and head.shape == (target.vocab_size, target.hidden_size):
        states = states.astype(head.dtype)
        if _close(states @ head.T, target.head(states)):
            del kept["lm_head.weight"]
    return kept


def _close(one: mx.array, other: mx.array) -> bool:
    if one.shape != other.shape:
        return False
    difference = mx.abs(one - other).max() / mx.abs(other).max()
    return bool((difference < 1e-3).item())
