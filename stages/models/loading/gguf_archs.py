"""GGUF architectures: their tensor names and numbers in mlx-lm's words.

To add one: a function from metadata to the mlx-lm configuration, its names, and an entry in
`ARCHITECTURES`. Sources: llama.cpp's `gguf-py/gguf/tensor_mapping.py` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
Get = Callable[..., Any]  # (key within the architecture, default) -> value

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA = ATTENTION | {"ffn_norm": "post_attention_layernorm"}
GEMMA3 = ATTENTION | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture is read. `interleaved`: q and k rows are stored for llama.cpp's
    rotary embedding; `norm_offset`: what was added to norm weights and must be taken off."""

    module: str  # below mlx_lm.models
    config: Callable[[Get], Config]
    names: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0

    def rename(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None: unknown."""
        stem, _, leaf = name.rpartition(".")
        if stem in TOP:
            return f"{TOP[stem]}.{leaf}"
        block, index, part = [*stem.split(".", 2), "", ""][:3]
        if block != "blk" or part not in self.names:
            return None
        return f"model.layers.{index}.{self.names[part]}.{leaf}"


def _common(get: Get) -> Config:
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    config: Config = {
        "hidden_size": hidden,
        "num_hidden_layers": int(get("block_count")),
        "intermediate_size": int(get("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", hidden // heads)),
        "rms_norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(get("context_length")),
        "rope_theta": float(get("rope.freq_base", 10000.0)),
    }
    if (kind := get("rope.scaling.type", "none")) != "none":
        factor = float(get("rope.scaling.factor"))
        config["rope_scaling"] = {"type": kind, "rope_type": kind, "factor": factor}
    return config


def _llama(get: Get) -> Config:
    return {"model_type": "llama"} | _common(get)


def _gemma3(get: Get) -> Config:
    """The 27B model alone scales its queries by another number than its head size."""
    config = _common(get)
    size = config["head_dim"]
    if config["num_hidden_layers"] == 62:
        size = config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": size,
        "sliding_window": int(get("attention.sliding_window")),
        "sliding_window_pattern": int(get("attention.sliding_window_pattern", 6)),
        "rope_theta": float(get("rope.freq_base", 1_000_000.0)),
        "rope_local_base_freq": float(get("rope.freq_base_swa", 10_000.0)),
    }


ARCHITECTURES = {
    "llama": Architecture("llama", _llama, LLAMA, interleaved=True),
    "gemma3": Architecture("gemma3_text", _gemma3, GEMMA3, norm_offset=1.0),
}
