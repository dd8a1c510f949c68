"""Random adapters for tiny checkpoints, written as mlx-lm and PEFT write them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from support import serving
from targets import Cpu

from stages.models.tiny import Tiny

LINEAR = ("q_proj", "v_proj", "o_proj", "down_proj", "in_proj", "out_proj", "in_proj_qkv")


def linears(target, names=LINEAR):
    """(outputs, inputs) of a model's linear layers with these names, by path."""
    found = {
        path: module
        for path, module in target.modules().items()
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and path.endswith(tuple(names))
    }
    return {
        path: (m.weight.shape[0], m.weight.shape[1] * 32 // getattr(m, "bits", 32))
        for path, m in found.items()
    }


def pairs(shapes, seed=0, rank=4, strength=0.3):
    """path -> (A (in, rank), B (rank, out)): large enough to change most tokens."""
    keys = mx.random.split(mx.random.key(seed), 2 * len(shapes))
    made = {}
    for at, (path, (outputs, inputs)) in enumerate(sorted(shapes.items())):
        a = mx.random.normal((inputs, rank), key=keys[2 * at]) * inputs**-0.5
        b = mx.random.normal((rank, outputs), key=keys[2 * at + 1]) * strength
        made[path] = a, b
    return made


def write_mlx(folder, made, *, scale=2.0, lengths=None, **config):
    """`lengths`: path -> m of DoRA."""
    tensors = {f"{path}.lora_a": a for path, (a, _) in made.items()}
    tensors |= {f"{path}.lora_b": b for path, (_, b) in made.items()}
    tensors |= {f"{path}.m": m for path, m in (lengths or {}).items()}
    rank = next(iter(made.values()))[0].shape[1]
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    config = {"fine_tune_type": "dora" if lengths else "lora", **config}
    config = {"num_layers": 16, "lora_parameters": parameters, **config}
    return _save(folder, "adapters.safetensors", tensors, config)


def write_peft(folder, made, *, alpha=8.0, **config):
    prefix = "base_model.model."
    tensors = {f"{prefix}{path}.lora_A.weight": a.T for path, (a, _) in made.items()}
    tensors |= {f"{prefix}{path}.lora_B.weight": b.T for path, (_, b) in made.items()}
    rank = next(iter(made.values()))[0].shape[1]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    return _save(folder, "adapter_model.safetensors", tensors, config)


def _save(folder, name, tensors, config):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / name), {k: mx.contiguous(v) for k, v in tensors.items()})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def written(home, family="llama"):
    """Folders for a tiny model: `a` and `b` of one rank, `wide` of another, `dora` with lengths, `twin`
    the same as `a`."""
    target = Tiny(Cpu(), family=family, cache_dir=str(home))
    target.open()
    shapes, modules = linears(target), target.modules()
    lengths = {path: modules[path].weight.square().sum(1).sqrt() for path in shapes}
    target.close()
    made = {name: pairs(shapes, seed=at) for at, name in enumerate("ab")}
    made |= {"wide": pairs(shapes, seed=7, rank=6), "twin": made["a"]}
    found = {name: write_mlx(home / name, made[name]) for name in made}
    return found | {"dora": write_mlx(home / "dora", pairs(shapes, seed=9), lengths=lengths)}


def opened(family, folders, *more):
    """An engine of that model with these mounted."""
    told = ", ".join(f"{name}: {folder}" for name, folder in folders.items())
    return serving(f"model.family={family}", "adapters=lora", f"adapters.folders={{{told}}}", *more)
