"""Attention and SwiGLU of wide passes against MLX's own, and who calls which."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from stages.models.loading import cpu_math


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def test_exp_is_within_two_units_in_the_last_place_and_ends_in_zero():
    x = np.concatenate([np.linspace(-87, 88, 100_001), [0.0, -1e-30, 1e-30]]).astype(np.float32)
    true = np.exp(x.astype(np.float64))
    got = np.array(cpu_math.exp(mx.array(x)))
    assert np.abs(got / true - 1).max() < 2.0**-22
    assert np.array(cpu_math.exp(mx.array([-88.0, -1e9, -np.inf]))).tolist() == [0, 0, 0]


def test_swiglu_agrees_also_far_out():
    gate, x = mx.array([-200.0, -88.0, -3.0, 0.0, 3.0, 90.0, 1e4]), mx.array([2.0] * 7)
    got, wanted = cpu_math.swiglu(gate, x), nn.silu(gate) * x
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5, atol=1e-30)
    gate, x = normal(3, 70, 33) * 4, normal(3, 70, 34)[..., :33]
    np.testing.assert_allclose(
        np.array(cpu_math.swiglu(gate, x)), np.array(nn.silu(gate) * x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("width", "length"), [(41, 41), (64, 100), (130, 301)])
@pytest.mark.parametrize("mask", ["none", "causal", "shared", "own"])
def test_attention_agrees_with_mlx(kv_heads, width, length, mask):
    q, k, v = normal(2, 6, width, 8), normal(2, kv_heads, length, 8), normal(2, kv_heads, length, 9)
    v = v[..., :8]
    rows = mx.arange(length - width, length)[:, None] >= mx.arange(length)
    own = mx.stack([rows, rows & (mx.arange(length) >= 3)])[:, None]
    given = {"none": None, "causal": "causal", "shared": rows, "own": own}[mask]
    got = cpu_math.attention(q, k, v, 0.3, given)
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=given)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-4, atol=1e-5)


def device(slow: bool) -> SimpleNamespace:
    return SimpleNamespace(kind="cpu", describe=lambda: {"slow_exp": slow})


@pytest.fixture
def model(monkeypatch):
    from mlx_lm.models import llama

    for name in ("scaled_dot_product_attention", "swiglu"):
        own = getattr(llama, name)
        monkeypatch.setattr(llama, name, getattr(own, "theirs", own))
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 50}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    mx.random.seed(3)
    return llama.Model(llama.ModelArgs(model_type="llama", **sizes, **heads))


def test_only_wide_passes_take_our_way_and_say_the_same(model, monkeypatch):
    tokens = mx.arange(60)[None] % 50
    plain = model(tokens)
    module = sys.modules[type(model).__module__]
    before = module.scaled_dot_product_attention
    assert cpu_math.quicken(model, device(slow=False)) == []
    assert module.scaled_dot_product_attention is before
    calls = []
    monkeypatch.setattr(
        cpu_math, "_attend", lambda *a, f=cpu_math._attend: calls.append(a[0].shape[2]) or f(*a)
    )
    assert cpu_math.quicken(model, device(slow=True)) != []
    assert cpu_math.quicken(model, device(slow=True)) == [], "wrapped twice"
    narrow = model(tokens[:, : cpu_math.NARROW])
    assert calls == []
    np.testing.assert_allclose(np.array(model(tokens)), np.array(plain), rtol=1e-4, atol=1e-5)
    assert calls == [60, 60]
    np.testing.assert_allclose(
        np.array(narrow), np.array(plain)[:, : cpu_math.NARROW], rtol=1e-4, atol=1e-5
    )
