"""Small random drafter checkpoints that fit the targets of `model=tiny`: mostly wrong, in the published
layouts. Written for trying and for tests:

    python -m stages.drafters.neural.tiny FOLDER HEAD_SIZE FAMILY …

writes all that fit each family and prints their folders: a JSON object, family -> option of `drafter` -> folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.drafters.neural.block import block_shapes, gemma_norms, head_norms
from stages.models.tiny import configuration

HIDDEN, VOCAB = 64, 279  # of every tiny target
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
Settings = Mapping[str, Any]


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


def eagle3(folder: Path, target: Settings) -> Path:
    shapes = eagle_shapes(HIDDEN, 96, 16, 4, 2, 200)
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200}
    return write(folder, config, shapes)


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


def mtp(folder: Path, target: Settings) -> Path:
    """A folder of its own, without the prefix."""
    return write(folder, {"model_type": "qwen3_5_mtp"}, mtp_shapes(target))


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


def nextn(folder: Path, target: Settings) -> Path:
    """The family's own layer, as it lies beside the target's."""
    if target["model_type"] == "glm4_moe":
        return write(folder, target, nextn_glm_shapes(target))
    prefix = f"model.layers.{target['num_hidden_layers']}."
    return write(folder, target, nextn_shapes(target, prefix, latent_attention(target)))


def nextn_glm_shapes(config: Mapping[str, Any]) -> Shapes:
    """GLM's layer, with grouped heads."""
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    plain = block_shapes("", hidden, 1, size, heads, kv) | head_norms("", size)
    names = [k for k in plain if k.startswith("self_attn.")]
    attention = {k.removeprefix("self_attn."): plain[k] for k in names}
    return nextn_shapes(config, f"model.layers.{config['num_hidden_layers']}.", attention)


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


def dflash(folder: Path, target: Settings) -> Path:
    """z-lab's nested settings, one layer with a window."""
    nested = {"block_size": 5, "mask_token_id": 278, "target_layer_ids": [0, 2, 3]}
    kinds = ["sliding_attention", "full_attention"]
    config = {**LAYER, "architectures": ["DFlashDraftModel"], "dflash_config": nested,
              "num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 6}  # fmt: skip
    return write(folder, config, block_layers())


def dspark(folder: Path, target: Settings) -> Path:
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
    return write(folder, config, shapes)


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


def assistant(folder: Path, target: Settings) -> Path:
    """Its sliding and full heads are as large as the target's: it reads their keys."""
    sizes = (target["head_dim"], target["global_head_dim"])
    config, shapes = assistant_shapes(sizes, heads=4, backbone=HIDDEN)
    return write(folder, config, shapes)


WRITERS: Mapping[str, Callable[[Path, Settings], Path]] = {
    "eagle3": eagle3,
    "mtp": mtp,
    "nextn": nextn,
    "dflash": dflash,
    "dspark": dspark,
    "assistant": assistant,
}
# Those that are part of one family's checkpoints; the others are trained for any target.
OF_ITS_FAMILY: Mapping[str, tuple[str, ...]] = {
    "mtp": ("qwen3_5",),
    "nextn": ("deepseek_v3", "glm4_moe"),
    "assistant": ("gemma4",),
}


def fits(drafter: str, family: str) -> bool:
    """Whether checkpoints of this kind are published for such a target."""
    return family in OF_ITS_FAMILY.get(drafter, (family,))


def checkpoint(drafter: str, family: str, folder: Path, head_size: int | None = None) -> Path:
    """Write one below `folder`, for `model=tiny model.family=… model.head_size=…`; its own folder."""
    target = configuration(family, head_size=head_size)
    return WRITERS[drafter](folder / f"{drafter}-{family}", target)


def main(argv: Sequence[str] | None = None) -> int:
    folder, size, *families = sys.argv[1:] if argv is None else argv
    made = {
        family: {
            name: str(checkpoint(name, family, Path(folder), int(size)))
            for name in WRITERS
            if fits(name, family)
        }
        for family in families
    }
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
