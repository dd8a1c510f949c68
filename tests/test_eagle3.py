"""EAGLE-3 forwards against the reference implementations' numbers, and what a wrong file gets."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from neural import GOLDEN, close, golden, seen_by, with_config

from pipeline.errors import OpenError
from stages.drafters.eagle3 import Dialect, Eagle3, EagleModel
from stages.drafters.neural.chain import ChainRows
from stages.drafters.neural.checkpoint import read

TAPS = {"qwen": [0, 1, 2, 4, 6], "safeai": None}


@pytest.fixture(params=["qwen", "safeai"])
def folder(request, tmp_path):
    more = {} if request.param == "safeai" else {"target_layer_ids": TAPS["qwen"]}
    return with_config(GOLDEN / f"eagle3_{request.param}", tmp_path / request.param, **more)


def opened(folder, target):
    checkpoint = read(folder)
    return EagleModel(checkpoint, Dialect.of(checkpoint, target), target)


def test_the_forward_is_the_references(folder):
    """Six prompt rows, then three steps on its own states, each in one cache."""
    name = folder.name
    want = golden(f"eagle3_{name}")
    model = opened(folder, seen_by(32, 60))
    rows = ChainRows(model, "n", 8)
    rows.prepare_append([[0]], [None]).commit()
    states = rows.run([want["in.tokens_shifted"].tolist()], [[want["in.features"]]])
    outputs = [states]
    for token in want["in.chain_tokens"].tolist():
        outputs.append(rows._forward(mx.array([[token]]), outputs[-1][:, -1:], [1]))
    states = mx.concatenate(outputs, axis=1)
    assert close(states[0], want["out.hidden"])
    assert close(model.scores(states)[0], want["out.logits"])


def test_rows_of_other_lengths_change_nothing(folder):
    want = golden(f"eagle3_{folder.name}")
    rows = ChainRows(opened(folder, seen_by(32, 60)), "n", 8)
    rows.prepare_append([[0]] * 3, [None] * 3).commit()
    ids, features = want["in.tokens_shifted"].tolist(), want["in.features"]
    rows.run([ids[:4], [], ids[:1]], [[features[:2], features[2:4]], [], [features[:1]]])
    states = rows.run([ids[4:], ids, []], [[features[4:]], [features], []])
    assert close(states[0, :2], want["out.hidden"][4:6])
    assert close(states[1, :6], want["out.hidden"][:6])


def test_speculators_files_mean_before_the_layer(tmp_path):
    """Their configuration is nested, and tap i is the output of layer i - 1; norms around fc."""
    source = GOLDEN / "eagle3_safeai"
    layer = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
             "vocab_size": 60}  # fmt: skip
    folder = tmp_path / "speculators"
    with_config(
        source, folder, speculators_model_type="eagle3", transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5], norm_before_residual=True,
    )  # fmt: skip
    random = np.random.default_rng(5)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    tensors["input_norm.weight"] = mx.array(1 + 0.1 * random.standard_normal(96, np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    checkpoint = read(folder)
    dialect = Dialect.of(checkpoint, seen_by(32, 60))
    assert (dialect.name, dialect.taps) == ("speculators", (1, 3, 4))
    model = EagleModel(checkpoint, dialect, seen_by(32, 60))
    rows = ChainRows(model, "n", 8)
    rows.prepare_append([[0]], [None]).commit()
    ids, features = random.integers(0, 60, 7), random.standard_normal((7, 96), np.float32)
    states = rows.run([ids.tolist()], [[mx.array(features)]])
    expected = by_numpy({k: np.array(v) for k, v in tensors.items()}, ids, features)
    assert close(states[0], expected)


def by_numpy(w, ids, features):
    """The speculators dialect, written from its description: norm before fc, normed residual."""

    def rms(x, name):
        scale = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
        return x / scale * w[f"{name}.weight"]

    def heads(x, name, count):
        return (x @ w[f"layers.0.self_attn.{name}.weight"].T).reshape(len(x), count, 8)

    def turned(x):
        angles = np.arange(len(x))[:, None] * 500000.0 ** (-np.arange(4) / 4)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        left, right = x[..., :4], x[..., 4:]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    fused = rms(features, "input_norm") @ w["fc.weight"].T
    residual = rms(fused, "layers.0.hidden_norm")
    embedded = rms(w["embed_tokens.weight"][ids], "layers.0.input_layernorm")
    x = np.concatenate([embedded, residual], -1)
    q, k, v = turned(heads(x, "q_proj", 4)), turned(heads(x, "k_proj", 2)), heads(x, "v_proj", 2)
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) * 8**-0.5
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    y = residual + out @ w["layers.0.self_attn.o_proj.weight"].T
    z = rms(y, "layers.0.post_attention_layernorm")
    gate = z @ w["layers.0.mlp.gate_proj.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (z @ w["layers.0.mlp.up_proj.weight"].T)
    return (y + inner @ w["layers.0.mlp.down_proj.weight"].T).astype(np.float32)


def test_a_smaller_vocabulary_is_mapped_by_offsets():
    model = opened(GOLDEN / "eagle3_safeai", seen_by(32, 60))
    offsets = np.array(mx.load(str(GOLDEN / "eagle3_safeai" / "model.safetensors"))["d2t"])
    ids = np.arange(40) + offsets
    assert model.to_target(mx.arange(40)).tolist() == ids.tolist()
    wide = model.spread(np.arange(40, dtype=np.float32))
    assert wide[ids].tolist() == list(range(40))
    assert np.isneginf(np.delete(wide, ids)).all()


def test_default_taps_are_the_outputs_of_layers_1_half_and_4_from_the_end():
    assert Dialect.of(read(GOLDEN / "eagle3_safeai"), seen_by(32, 60, 36)).taps == (1, 17, 32)


def test_a_head_for_another_target_says_both_numbers():
    head = Eagle3(seen_by(48, 100), path=str(GOLDEN / "eagle3_safeai"))
    with pytest.raises(OpenError, match=r"fc .*made for 96, some model has 144[\s\S]*60.*100"):
        head.open()


def test_all_tensors_that_do_not_fit_are_listed(tmp_path):
    folder = with_config(GOLDEN / "eagle3_safeai", tmp_path / "x", intermediate_size=64)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    del tensors["norm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), tensors | {"odd.weight": mx.zeros(3)})
    with pytest.raises(OpenError) as caught:
        Eagle3(seen_by(32, 60), path=str(folder)).open()
    text = str(caught.value)
    assert "5 tensors" in text
    assert "missing norm.weight (32,)" in text
    assert "unknown odd.weight (3,)" in text
    assert "midlayer.mlp.up_proj.weight is (48, 32), wants (64, 32)" in text


def test_no_drafters_folder(tmp_path):
    with pytest.raises(OpenError, match=r"no config\.json"):
        Eagle3(seen_by(32, 60), path=str(tmp_path)).open()
