"""Small configurations of model families, for `model=tiny`. To add a family: one entry.

`module` is mlx-lm's; `config` overrides `COMMON`; `min_layers` is what the family's layer pattern
needs. Sizes are small enough for a forward of about a millisecond and large enough that every
mechanism of the family (grouped heads, window, pattern) takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

LINEAR: Mapping[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
MOE: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


@dataclass(frozen=True)
class Family:
    """One entry of `FAMILIES`. `window` names the configuration key of a sliding window."""

    module: str
    config: Mapping[str, Any] = field(default_factory=dict)
    window: str = ""
    min_layers: int = 1


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "qwen3": Family("qwen3"),
    "gemma3": Family(
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
            "rope_local_base_freq": 1000.0,
        },
        window="sliding_window",
        min_layers=3,
    ),
    "qwen3_next": Family("qwen3_next", {**LINEAR, **MOE, "decoder_sparse_step": 2}, min_layers=2),
    "qwen3_5": Family("qwen3_5", LINEAR, min_layers=2),
}
