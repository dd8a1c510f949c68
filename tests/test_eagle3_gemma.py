"""DeepSpec's EAGLE-3 heads for Gemma 4, against a forward written from their description."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from by_numpy import attend, rms
from neural import close, seen_by

from pipeline.errors import OpenError
from stages.drafters.eagle3 import Eagle3
from stages.drafters.neural.block import block_shapes, gemma_norms, head_norms
from stages.drafters.neural.tiny import write

H, INNER, HEADS, SIZE, VOCAB, EPS = 32, 48, 4, 24, 50, 1e-6
AT = "layers.0."
ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
CONFIG = {
    "architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text", "hidden_size": H,
    "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": SIZE,
    "attention_k_eq_v": True, "rms_norm_eps": EPS, "final_logit_softcapping": 30.0,
    "vocab_size": VOCAB, "target_layer_ids": [1, 3, 5], "rope_parameters": {"full_attention": ROPE},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    shapes = block_shapes(AT, H, INNER, SIZE, HEADS, 1, wide=2) | head_norms(AT, SIZE)
    shapes |= gemma_norms(AT, H) | {f"{AT}hidden_norm.weight": (H,), "norm.weight": (H,)}
    shapes |= {"fc.weight": (H, 3 * H)}
    shapes |= {f"{name}.weight": (VOCAB, H) for name in ("embed_tokens", "lm_head")}
    del shapes[f"{AT}self_attn.v_proj.weight"]  # values are the keys' raw projection
    return write(tmp_path / "gemma", CONFIG, shapes)


def by_numpy(w, ids, features):
    """(states, scores) of these pairs in one row."""

    def normed(x, name):
        return rms(x, w[f"{AT}{name}.weight"], EPS)

    def heads(x, name, count):
        return (x @ w[f"{AT}self_attn.{name}.weight"].T).reshape(len(x), count, SIZE)

    def turned(x):
        """A quarter of the pairs turns; the exponent counts in the whole head."""
        steps = np.where(np.arange(SIZE // 2) < SIZE // 8, 1e6 ** (-2 * np.arange(12) / SIZE), 0.0)
        angles = np.arange(len(x))[:, None] * steps
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        left, right = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    state = features @ w["fc.weight"].T
    embedded = normed(w["embed_tokens.weight"][ids] * H**0.5, "input_layernorm")
    x = np.concatenate([embedded, normed(state, "hidden_norm")], -1)
    raw = heads(x, "k_proj", 1)
    q = turned(normed(heads(x, "q_proj", HEADS), "self_attn.q_norm"))
    k, v = turned(normed(raw, "self_attn.k_norm")), rms(raw, 1.0, EPS)
    out = attend(q, np.repeat(k, HEADS, 1), np.repeat(v, HEADS, 1), 1.0)
    y = state + normed(out @ w[f"{AT}self_attn.o_proj.weight"].T, "post_attention_layernorm")
    z = normed(y, "pre_feedforward_layernorm")
    gate, up = (z @ w[f"{AT}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    inner = (gelu * up) @ w[f"{AT}mlp.down_proj.weight"].T
    y = (y + normed(inner, "post_feedforward_layernorm")) * w[f"{AT}layer_scalar"]
    scores = rms(y, w["norm.weight"], EPS) @ w["lm_head.weight"].T
    return y, np.tanh(scores / 30) * 30


def test_it_opens_and_its_forward_is_the_described_one(folder):
    head = Eagle3(seen_by(H, VOCAB), path=str(folder))
    head.open()
    assert head.taps == (1, 3, 5)
    assert head.bytes_per_token == 2 * SIZE * 4
    rows = head.rows(head._target, 8)
    rows.prepare_append([[0]], [None]).commit()
    random = np.random.default_rng(2)
    ids, features = random.integers(0, VOCAB, 7), random.standard_normal((7, 3 * H), np.float32)
    states = rows.run([ids.tolist()], [[mx.array(features)]])
    w = {k: np.array(v) for k, v in mx.load(str(folder / "model.safetensors")).items()}
    expected, scores = by_numpy(w, ids, features)
    assert close(states[0], expected)
    assert close(head.model.scores(states)[0], scores)


def test_a_missing_norm_is_named(folder):
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    del tensors[f"{AT}post_feedforward_layernorm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(OpenError, match=r"missing layers\.0\.post_feedforward_layernorm.weight"):
        Eagle3(seen_by(H, VOCAB), path=str(folder)).open()
