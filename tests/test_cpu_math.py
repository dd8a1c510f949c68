"""Attention and SwiGLU on an x86 CPU against MLX's own, and who calls which."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from stages.device import Device
from stages.models.loading import cpu_math


@pytest.fixture(scope="module", autouse=True)
def ours():
    """Only our BLAS knows a softmax."""
    device = Device(threads=1)
    device.open()
    if not device.describe()["exact_width"]:
        pytest.skip("another BLAS is in use")


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


def softmax_times(scores: mx.array, values: mx.array, scale: float = 1.0) -> np.ndarray:
    return np.array(mx.addmm(mx.array(0.0), scores, values, alpha=float("nan"), beta=scale))


def test_swiglu_agrees_also_far_out():
    gate, x = mx.array([-200.0, -88.0, -3.0, 0.0, 3.0, 90.0, 1e4]), mx.array([2.0] * 7)
    got, wanted = cpu_math.swiglu(gate, x), nn.silu(gate) * x
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5, atol=1e-30)
    gate, x = normal(3, 70, 33) * 4, normal(3, 70, 34)[..., :33]
    np.testing.assert_allclose(
        np.array(cpu_math.swiglu(gate, x)), np.array(nn.silu(gate) * x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("length", [1, 5, 16, 100, 333])
def test_softmax_is_nearer_to_the_true_value_than_float32_needs(length):
    scores = normal(7, length) * 9
    exact = np.exp(0.25 * (np.array(scores, np.float64) - np.array(scores).max(-1, keepdims=True)))
    exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        softmax_times(scores, mx.eye(length), 0.25), exact, rtol=2e-6, atol=1e-37
    )


def test_softmax_far_below_masked_and_not_a_number():
    low = float(mx.finfo(mx.float32).min)
    scores = mx.array([[0, -87, -88.1, -1e9], [low, 3, low, 3], [low] * 4, [0, float("nan"), 0, 0]])
    got = softmax_times(scores, mx.eye(4))
    assert got[0, 0] == 1 and 0 < got[0, 1] < 2e-38 and got[0, 2:].tolist() == [0, 0]
    assert got[1].tolist() == [0, 0.5, 0, 0.5]
    assert got[2].tolist() == [0.25] * 4, "where nothing is open, all weigh the same"
    assert np.isnan(got[3]).all()


def test_what_stands_masked_around_a_row_changes_no_bit():
    scores, values = normal(1, 77), normal(77, 64)
    alone = softmax_times(scores, values)
    for before, after in ((0, 1), (1, 0), (5, 40), (16, 16), (33, 3)):
        around = mx.pad(scores, ((3, 9), (before, after)), constant_values=mx.finfo(mx.float32).min)
        got = softmax_times(around, mx.pad(values, ((before, after), (0, 0)), constant_values=7.0))
        assert np.array_equal(got[3], alone[0]), (before, after)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("width", "length"), [(1, 9), (41, 41), (64, 100), (130, 301)])
@pytest.mark.parametrize("mask", ["none", "causal", "shared", "own"])
def test_attention_agrees_with_mlx(kv_heads, width, length, mask):
    q, k, v = normal(2, 6, width, 8), normal(2, kv_heads, length, 8), normal(2, kv_heads, length, 9)
    rows = mx.arange(length - width, length)[:, None] >= mx.arange(length)
    own = mx.stack([rows, rows & (mx.arange(length) >= 3)])[:, None]
    given = {"none": None, "causal": "causal", "shared": rows, "own": own}[mask]
    got = cpu_math.attention(q, k, v, 0.3, given)
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=given)
    assert got.shape == wanted.shape
    open_rows = slice(3, None) if mask == "own" and width == length else slice(None)
    np.testing.assert_allclose(
        np.array(got)[:, :, open_rows], np.array(wanted)[:, :, open_rows], rtol=1e-4, atol=1e-5
    )


def device(slow: bool, exact: bool) -> SimpleNamespace:
    return SimpleNamespace(kind="cpu", describe=lambda: {"slow_exp": slow, "exact_width": exact})


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


def test_models_take_our_way_where_it_helps_and_say_the_same(model, monkeypatch):
    tokens = mx.arange(60)[None] % 50
    plain = model(tokens)
    module = sys.modules[type(model).__module__]
    before = module.scaled_dot_product_attention
    assert cpu_math.quicken(model, device(slow=False, exact=False)) == []
    assert module.scaled_dot_product_attention is before
    calls = []
    monkeypatch.setattr(
        cpu_math, "_attend", lambda *a, f=cpu_math._attend: calls.append(a[0].shape[2]) or f(*a)
    )
    assert cpu_math.quicken(model, device(slow=True, exact=True)) != []
    assert cpu_math.quicken(model, device(slow=True, exact=True)) == [], "wrapped twice"
    np.testing.assert_allclose(np.array(model(tokens)), np.array(plain), rtol=1e-4, atol=1e-5)
    assert calls == [60, 60]
    one = model(tokens[:, :1])
    assert calls == [60, 60, 1, 1], "at every width"
    np.testing.assert_allclose(np.array(one)[:, 0], np.array(plain)[:, 0], rtol=1e-4, atol=1e-5)
