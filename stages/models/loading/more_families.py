"""Small configurations of the other families of mlx-lm, for `model=tiny` and for the sweep that says which
of them can be served (`python tests/sweep_models.py`). To add a family: one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.models.loading.families import LINEAR, MOE, ROUTED, Family

ANY: Mapping[str, Any] = {  # what several families want; mlx-lm leaves out what one does not know
    **MOE,
    **ROUTED,
    "use_bias": False, "mlp_bias": False, "use_qkv_bias": True, "use_qk_norm": True,
    "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-6, "rope_traditional": False,
    "decoder_sparse_step": 1, "num_shared_experts": 1, "num_local_experts": 4,
    "partial_rotary_factor": 0.5, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
INDEXED: Mapping[str, Any] = {
    **LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8,
}  # fmt: skip
HYBRID: Mapping[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "mamba_proj_bias": False, "mamba_conv_bias": True,
}  # fmt: skip
GPT: Mapping[str, Any] = {
    "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 128, "n_positions": 512, "n_ctx": 512,
}  # fmt: skip
NEAR_FAR = ["sliding_attention", "full_attention"]
ROPE: Mapping[str, Any] = {"rope_theta": 10000.0, "rope_type": "default", "type": "default"}


def _family(module: str, **config: Any) -> Family:
    """`sliding_window` and lists with one entry a layer are found in the configuration."""
    nested = config.pop("nested", "")
    return Family(module, {**ANY, **config}, nested=nested)


MORE: Mapping[str, Family] = {
    family.module: family
    for family in (
        _family("Klear"),
        _family(
            "afm7", hidden_dim=64, num_layers=4, num_kv_reuse_layers=1, num_heads=4, num_kv_heads=2
        ),
        _family("afmoe", layer_types=NEAR_FAR * 2, sliding_window=12, num_dense_layers=1),
        _family("apertus", post_norm=False, qk_norm=True),
        _family("baichuan_m1", sliding_window=12, sliding_window_layers=[0, 2], conv_window=2),
        _family("bailing_hybrid", layer_group_size=2, group_norm_size=1, **LATENT),
        _family("bailing_moe", topk_group=1),
        _family("bailing_moe_linear", layer_group_size=2, group_norm_size=1, topk_group=1),
        _family("bailing_moe_v3"),
        _family("bitnet"),
        _family("cohere"),
        _family("cohere2", sliding_window=12, sliding_window_pattern=2),
        _family(
            "dbrx",
            d_model=64,
            n_layers=4,
            n_heads=4,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        _family("deepseek"),
        _family(
            "deepseek_v2",
            topk_method="gready",
            rope_scaling={
                "factor": 1.0,
                "type": "yarn",
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            **LATENT,
        ),
        _family("deepseek_v32", **INDEXED),
        _family(
            "deepseek_v41",
            q_lora_rank=32,
            qk_rope_head_dim=8,
            o_groups=2,
            o_lora_rank=16,
            sliding_window=12,
            index_n_heads=2,
            index_head_dim=16,
            index_topk=8,
            num_hidden_layers=2,
        ),
        _family("dots1"),
        _family("ernie4_5"),
        _family("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_layer_start_index=1),
        _family("exaone", num_layers=4),
        _family("exaone4", sliding_window=12, sliding_window_pattern="LLLG"),
        _family(
            "exaone_moe",
            sliding_window=12,
            layer_types=NEAR_FAR * 2,
            is_moe_layer=[False, True] * 2,
        ),
        _family("gemma"),
        _family(
            "gemma2",
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            query_pre_attn_scalar=16,
        ),
        _family("glm"),
        _family("glm4"),
        _family("glm4_moe_lite", **LATENT),
        _family("glm_moe_dsa", rope_parameters=ROPE, **INDEXED),
        _family("gpt2", **GPT),
        _family("gpt_bigcode", **GPT),
        _family("gpt_neox", rotary_emb_base=10000, rotary_pct=0.5),
        _family("gptj", rotary_dim=8, **GPT),
        _family("granite"),
        _family("granitemoe"),
        _family(
            "granitemoehybrid",
            layer_types=["mamba", "attention"] * 2,
            shared_intermediate_size=64,
            **HYBRID,
        ),
        _family("helium"),
        _family(
            "hunyuan",
            moe_topk=2,
            num_shared_expert=1,
            use_mixed_mlp_moe=True,
            use_cla=True,
            cla_share_factor=2,
            rope_scaling={"type": "dynamic", "alpha": 1.0, "factor": 1.0},
        ),
        _family("hunyuan_v1_dense"),
        _family("internlm2", bias=False),
        _family("internlm3"),
        _family("iquestloopcoder"),
        _family(
            "jamba",
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
            mamba_expand=2,
            **HYBRID,
        ),
        _family(
            "kimi_linear",
            linear_attn_config={
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
            model_max_length=4096,
            num_experts_per_token=2,
            **LATENT,
        ),
        _family(
            "laguna",
            rope_parameters=ROPE,
            sliding_window=12,
            layer_types=NEAR_FAR * 2,
            mlp_layer_types=["dense", "sparse"] * 2,
            num_attention_heads_per_layer=[4] * 4,
            gating=True,
        ),
        _family(
            "lfm2",
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"] * 2,
        ),
        _family(
            "lfm2_moe",
            use_expert_bias=True,
            num_dense_layers=1,
            conv_bias=False,
            conv_L_cache=3,
            layer_types=["conv", "full_attention"] * 2,
        ),
        _family("lille-130m", block_size=512, n_kv_heads=2, **GPT),
        _family("llama4_text", intermediate_size_mlp=128, no_rope_layers=[1, 0] * 2),
        _family(
            "longcat_flash",
            attention_method="MLA",
            zero_expert_type="identity",
            ffn_hidden_size=64,
            moe_topk=2,
            expert_ffn_hidden_size=32,
            zero_expert_num=1,
            num_layers=2,
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
            **LATENT,
        ),
        _family("mamba", state_size=16, conv_kernel=4, use_conv_bias=True, time_step_rank=4),
        _family(
            "mellum",
            sliding_window=12,
            layer_types=NEAR_FAR * 2,
            rope_parameters=dict.fromkeys(NEAR_FAR, ROPE),
        ),
        _family("mimo", num_nextn_predict_layers=0),
        _family(
            "mimo_v2_flash",
            hybrid_layer_pattern=[0, 1] * 2,
            moe_layer_freq=[0, 1] * 2,
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=12,
            layernorm_epsilon=1e-6,
            swa_rope_theta=1e4,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=16,
            swa_v_head_dim=16,
            v_head_dim=16,
        ),
        _family("minicpm", dim_model_base=64, scale_depth=1.4, scale_emb=12.0),
        _family(
            "minicpm3",
            dim_model_base=64,
            scale_depth=1.4,
            scale_emb=12.0,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
                "original_max_position_embeddings": 4096,
            },
            **LATENT,
        ),
        _family("minimax", shared_intermediate_size=64, rotary_dim=8),
        _family(
            "ministral3",
            sliding_window=12,
            layer_types=NEAR_FAR * 2,
            rope_parameters={
                **ROPE,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        ),
        _family("mistral3", nested="text_config"),
        _family(
            "mistral4",
            rope_parameters={
                **ROPE,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
            **LATENT,
        ),
        _family("mixtral"),
        _family("muse_glimmer", sliding_window=12),
        _family("nanbeige"),
        _family("nanochat"),
        _family("nemotron", hidden_act="relu2"),
        _family("olmo2"),
        _family("olmo3", sliding_window=12, layer_types=NEAR_FAR * 2),
        _family(
            "olmo_hybrid",
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_allow_neg_eigval=True,
            **LINEAR,
        ),
        _family("olmoe"),
        _family(
            "openelm",
            num_transformer_layers=2,
            model_dim=64,
            ffn_dim_divisor=16,
            num_query_heads=[4, 4],
            num_kv_heads=[2, 2],
            ffn_multipliers=[1.0, 2.0],
        ),
        _family("phi"),
        _family("phi3"),
        _family("phimoe"),
        _family("phixtral", num_vocab=279, model_dim=64, num_heads=4, num_layers=2, rotary_dim=8),
        _family("plamo", n_shared_head=2),
        _family(
            "plamo2", hidden_size_per_head=16, mamba_num_heads=4, mamba_d_state=16, mamba_step=2
        ),
        _family("plamo3", window_size=12, sliding_window=12, sliding_window_pattern=2),
        _family("qwen", kv_channels=16),
        _family("qwen2"),
        _family("qwen2_moe"),
        _family("qwen3_5_moe", nested="text_config", **LINEAR),
        _family("qwen3_moe"),
        _family("qwen3_vl", nested="text_config"),
        _family(
            "recurrent_gemma",
            conv1d_width=4,
            logits_soft_cap=30.0,
            attention_window_size=12,
            block_types=["recurrent", "attention"],
        ),
        _family(
            "rwkv7", a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8, decay_low_rank_dim=8
        ),
        _family("seed_oss"),
        _family("smollm3"),
        _family("solar_open"),
        _family(
            "spark2_5",
            sliding_window=12,
            layer_types=NEAR_FAR * 2,
            rope_parameters=dict.fromkeys(NEAR_FAR, ROPE),
        ),
        _family("stablelm"),
        _family("starcoder2"),
        _family(
            "step3p5",
            num_attention_groups=2,
            sliding_window=12,
            layer_types=NEAR_FAR * 2,
            moe_num_experts=4,
            moe_top_k=2,
            share_expert_dim=32,
            moe_layers_enum="1,3",
        ),
        _family("talkie"),
        _family("telechat3"),
        _family("youtu_llm", **LATENT),
    )
}
