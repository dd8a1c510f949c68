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
from targets import Cpu

from stages.drafters.neural.block import block_shapes, gemma_norms, head_norms
from stages.models.tiny import Tiny

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


def eagle_shapes(hidden: int, inner: int, size: int, heads: int, kv: int, own: int) -> Shapes:
    """SafeAILab's dialect with a smaller vocabulary, the target's embedding shared."""
    return block_shapes("midlayer.", hidden, inner, size, heads, kv, wide=2) | {
        "midlayer.hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (own, hidden),
        "d2t": (own,),
    }


def eagle3(folder: Path) -> tuple[str, ...]:
    shapes = eagle_shapes(HIDDEN, 96, 16, 4, 2, 200)
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200}
    write(folder / "eagle3", config, shapes)
    return "model.family=llama", "drafter=eagle3", f"drafter.path={folder / 'eagle3'}"


def mtp_shapes(config: Mapping[str, Any], prefix: str = "") -> Shapes:
    """A dense Qwen3.5 head as published."""
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    layer = block_shapes("layers.0.", hidden, config["intermediate_size"], size, heads, kv)
    layer |= head_norms("layers.0.", size)
    layer["layers.0.self_attn.q_proj.weight"] = (2 * heads * size, hidden)
    around = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes = layer | {f"{name}.weight": (hidden,) for name in around}
    return {prefix + k: v for k, v in shapes.items() | {("fc.weight", (hidden, 2 * hidden))}}


def mtp(folder: Path) -> tuple[str, ...]:
    """A folder of its own, without the prefix."""
    config = Tiny(Cpu(), family="qwen3_5")._settings()
    write(folder / "mtp", {"model_type": "qwen3_5_mtp"}, mtp_shapes(config))
    return "model.family=qwen3_5", "drafter=mtp", f"drafter.path={folder / 'mtp'}"


def nextn_shapes(config: Mapping[str, Any], prefix: str, attention: Shapes) -> Shapes:
    """A sparse layer as DeepSeek and GLM publish it, copies of embedding and head included."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: Shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    shapes |= {
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (VOCAB, hidden),
        "shared_head.head.weight": (VOCAB, hidden),
        "mlp.gate.weight": (config["n_routed_experts"], hidden),
        "mlp.gate.e_score_correction_bias": (config["n_routed_experts"],),
    }
    experts = [f"experts.{e}" for e in range(config["n_routed_experts"])]
    for name in [*experts, "shared_experts"]:
        shapes |= {f"mlp.{name}.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        shapes[f"mlp.{name}.down_proj.weight"] = (hidden, inner)
    return {prefix + name: shape for name, shape in shapes.items()}


def latent_attention(config: Mapping[str, Any]) -> Shapes:
    """DeepSeek's, as published."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q, kv, turned = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "q_a_proj.weight": (q, hidden),
        "q_a_layernorm.weight": (q,),
        "q_b_proj.weight": (heads * (plain + turned), q),
        "kv_a_proj_with_mqa.weight": (kv + turned, hidden),
        "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (heads * (plain + value), kv),
        "o_proj.weight": (hidden, heads * value),
    }


def nextn(folder: Path) -> tuple[str, ...]:
    """DeepSeek's layer beside a tiny DeepSeek."""
    config = Tiny(Cpu(), family="deepseek_v3")._settings()
    prefix = f"model.layers.{config['num_hidden_layers']}."
    shapes = nextn_shapes(config, prefix, latent_attention(config))
    write(folder / "nextn", config, shapes)
    return "model.family=deepseek_v3", "drafter=nextn", f"drafter.path={folder / 'nextn'}"


def nextn_glm_shapes(config: Mapping[str, Any]) -> Shapes:
    """GLM's layer, with grouped heads."""
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    plain = block_shapes("", hidden, 1, size, heads, kv) | head_norms("", size)
    names = [k for k in plain if k.startswith("self_attn.")]
    attention = {k.removeprefix("self_attn."): plain[k] for k in names}
    return nextn_shapes(config, f"model.layers.{config['num_hidden_layers']}.", attention)


def nextn_glm(folder: Path) -> tuple[str, ...]:
    config = Tiny(Cpu(), family="glm4_moe")._settings()
    write(folder / "glm", config, nextn_glm_shapes(config))
    return "model.family=glm4_moe", "drafter=nextn", f"drafter.path={folder / 'glm'}"


def block_layers(
    hidden: int = HIDDEN, inner: int = 96, size: int = 16, heads: int = 4, kv: int = 2,
    layers: int = 2,
) -> Shapes:  # fmt: skip
    """DFlash's backbone over three taps."""
    shapes: Shapes = {"fc.weight": (hidden, 3 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    for prefix in (f"layers.{i}." for i in range(layers)):
        shapes |= block_shapes(prefix, hidden, inner, size, heads, kv) | head_norms(prefix, size)
    return shapes


def dflash(folder: Path) -> tuple[str, ...]:
    """z-lab's nested settings, one layer with a window."""
    nested = {"block_size": 5, "mask_token_id": 278, "target_layer_ids": [0, 2, 3]}
    kinds = ["sliding_attention", "full_attention"]
    config = {**LAYER, "architectures": ["DFlashDraftModel"], "dflash_config": nested,
              "num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 6}  # fmt: skip
    write(folder / "dflash", config, block_layers())
    return "model.family=llama", "drafter=dflash", f"drafter.path={folder / 'dflash'}"


def dspark(folder: Path) -> tuple[str, ...]:
    """A gated head, embedding and head of its own."""
    shapes = block_layers() | {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "markov_head.markov_w1.weight": (VOCAB, 8),
        "markov_head.markov_w2.weight": (VOCAB, 8),
        "markov_head.gate_proj.weight": (8, HIDDEN + 8),
        "markov_head.gate_proj.bias": (8,),
        "confidence_head.proj.weight": (1, HIDDEN + 8),
        "confidence_head.proj.bias": (1,),
    }
    config = {**LAYER, "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 2,
              "block_size": 4, "mask_token_id": 278, "target_layer_ids": [0, 2, 3],
              "markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True,
              "confidence_head_with_markov": True}  # fmt: skip
    write(folder / "dspark", config, shapes)
    return "model.family=llama", "drafter=dspark", f"drafter.path={folder / 'dspark'}"


def assistant_shapes(
    sizes: tuple[int, int], heads: int, backbone: int
) -> tuple[dict[str, Any], Shapes]:
    """Configuration and tensors of a Gemma 4 assistant; `sizes` of sliding and full heads."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    turns = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    text = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": heads,
            "layer_types": kinds, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
            "rope_parameters": turns}  # fmt: skip
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCAB, 32),
        "model.norm.weight": (32,),
        "pre_projection.weight": (32, 2 * backbone),
        "post_projection.weight": (backbone, 32),
    }
    for i, kind in enumerate(kinds):
        prefix, size = f"model.layers.{i}.", sizes[kind == kinds[-1]]
        layer = block_shapes(prefix, 32, 40, size, heads, 1) | head_norms(prefix, size)
        layer |= gemma_norms(prefix, 32)
        own = ("k_proj", "v_proj", "k_norm")
        shapes |= {k: v for k, v in layer.items() if not any(name in k for name in own)}
    return {"model_type": "gemma4_assistant", "text_config": text}, shapes


def assistant(folder: Path, sizes: tuple[int, int] = (16, 32)) -> tuple[str, ...]:
    """`sizes` of sliding and full heads are the tiny target's."""
    config, shapes = assistant_shapes(sizes, heads=4, backbone=HIDDEN)
    write(folder / "assistant", config, shapes)
    return "model.family=gemma4", "drafter=assistant", f"drafter.path={folder / 'assistant'}"


TINY: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "eagle3": eagle3,
    "mtp": mtp,
    "nextn": nextn,
    "nextn_glm": nextn_glm,
    "dflash": dflash,
    "dspark": dspark,
    "assistant": assistant,
}

KINDS = (*sorted(set(TINY) - {"nextn_glm"}), "auto")  # options that need a checkpoint
FAMILIES = {"dense": "llama", "sliding": "gemma3", "hybrid": "qwen3_5", "latent": "deepseek_v3"}
ONLY = {  # drafters made for one family: by kind of layer, which tiny one
    "mtp": {"hybrid": "mtp"},
    "nextn": {"latent": "nextn", "dense": "nextn_glm"},
    "assistant": {"sliding": "assistant"},
}


def tiny_pair(drafter: str, layers: str, folder: Path) -> tuple[str, ...]:
    """Overrides of a target with such layers and this drafter for it. What reads taps fits every
    target of its size; `auto` gets an EAGLE head."""
    family = f"model.family={FAMILIES[layers]}"
    if drafter in ONLY:
        return tiny_checkpoint(ONLY[drafter][layers], folder)
    if drafter not in KINDS:
        return family, f"drafter={drafter}"
    _, _, path = tiny_checkpoint("eagle3" if drafter == "auto" else drafter, folder)
    return family, f"drafter={drafter}", path
