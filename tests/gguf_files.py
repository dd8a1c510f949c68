"""Write a checkpoint as llama.cpp's converter would, independently of the code that reads it."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np


def to_gguf(folder, path, arch, quantize=None):
    """The checkpoint as llama.cpp's converter writes it: its names, rows and norm convention."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(str(path), arch)
    _describe(writer, config, folder)
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        new, values = _converted(name, np.array(array), config, arch)
        kind = quantize if quantize and values.ndim == 2 else None
        if kind:
            number = GGMLQuantizationType[kind]
            writer.add_tensor(new, quants.quantize(values, number), raw_dtype=number)
        else:
            writer.add_tensor(new, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer, config, folder):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_uint32(
            "gemma3.attention.sliding_window_pattern", config["sliding_window_pattern"]
        )
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    words = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if "<|" in word else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocab["<|bos|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(
        json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    )
    writer.add_float32("general.sampling.temp", 0.5)


NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    },
}


def _converted(name, array, config, arch):
    key = next(k for k in (NAMES | NORMS[arch]) if k in name)
    new = (NAMES | NORMS[arch])[key] + ".weight"
    if ".layers." in name:
        new = f"blk.{name.split('.')[2]}.{new}"
    if arch == "llama" and key.endswith(("q_proj", "k_proj")):
        heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
        array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    if arch == "gemma3" and "norm" in key:
        array = array + 1
    return new, array
