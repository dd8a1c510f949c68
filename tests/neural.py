"""Golden checkpoints, and the little of a target that a drafter's model looks at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

GOLDEN = Path(__file__).parent / "golden" / "drafters"


def golden(name: str) -> Mapping[str, mx.array]:
    return mx.load(str(GOLDEN.parent / "answers" / f"{name}.safetensors"))


def with_config(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint whose configuration says other things."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def seen_by(hidden: int, vocab: int, layers: int = 8, **more: Any) -> Any:
    """Numbers of a target, and an embedding that only tells the type."""
    return SimpleNamespace(
        name="some model",
        hidden_size=hidden,
        vocab_size=vocab,
        layer_count=layers,
        head=lambda hidden: mx.zeros((*hidden.shape[:-1], vocab)),
        embed=lambda ids: mx.zeros((*ids.shape, hidden)),
        **more,
    )


def close(one: Any, other: Any, atol: float = 1e-4) -> bool:
    return bool(mx.allclose(mx.array(one), mx.array(other), atol=atol, rtol=0).item())
