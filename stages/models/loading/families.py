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

ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "attention_bias": False,
}


@dataclass(frozen=True)
class Family:
    """One entry of `FAMILIES`. `window` names the configuration key of a sliding window, `pattern` that
    of a list with one word a layer, which is repeated for as many layers as are asked for, `nested` that
    of the part that describes the text model of a larger one."""

    module: str
    config: Mapping[str, Any] = field(default_factory=dict)
    window: str = ""
    min_layers: int = 1
    pattern: str = ""
    nested: str = ""


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
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **ROUTED,
            "kv_lora_rank": 24,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "glm4_moe": Family("glm4_moe", {**ROUTED, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        window="sliding_window",
        min_layers=2,
        pattern="layer_types",
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
        },
        window="sliding_window",
        min_layers=6,
    ),
    "llama4": Family(
        "llama4",
        {
            "attention_chunk_size": 12,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "rope_scaling": None,
            "use_qk_norm": True,
            "floor_scale": 16,
        },
        window="attention_chunk_size",
        min_layers=4,
        nested="text_config",
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_d_head": 16,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
        },
    ),
    "mamba2": Family(
        "mamba2",
        {
            "num_heads": 8,
            "state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
            "time_step_limit": [0.001, 100.0],
            "layer_norm_epsilon": 1e-6,
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "hybrid_override_pattern": ["M", "*", "M", "-"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-6,
        },
        min_layers=4,
        pattern="hybrid_override_pattern",
    ),
}
