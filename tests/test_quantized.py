"""Affine codes: products on them equal products on what they stand for; what cannot be coded."""

from __future__ import annotations

import mlx.core as mx
import pytest
from targets import Cpu, opened

from pipeline.errors import OpenError
from pipeline.types import LayerSpec
from stages.kv.affine import Affine
from stages.kv.shapes import shape_of
from stages.models.fake import Fake
from stages.models.tiny import Tiny
from stages.rows.grid import Grid
from stages.rows.quantized import QuantizedLayout

HEADS, KEYS = 2, 70
SHAPES = [(64, 64), (64, 32), (256, 64), (128, 128)]


def plain(q, k, v, scale, mask, sinks=None):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def both(bits, size, group, width, mask, sinks=None, dtype=mx.float32):
    """Attention on codes, and on the vectors spelled out."""
    mx.random.seed(3)
    grid = Grid(bits, group)
    layout = QuantizedLayout(LayerSpec("full"), 9, grid, grid)
    k, v = (mx.random.normal((2, HEADS, KEYS + 9, size)).astype(dtype) for _ in range(2))
    q = mx.random.normal((2, HEADS * 3, width, size)).astype(dtype)
    asked = q * 1
    keys, values = (tuple(a[:, :, :KEYS] for a in grid.pack(x)) for x in (k, v))
    got = layout.attend(None, q, keys, values, size**-0.5, mask, sinks)
    assert mx.array_equal(q, asked)  # the caller's queries are left alone
    vectors = grid.spell_out(keys), grid.spell_out(values)
    return got, plain(q, *vectors, size**-0.5, mask, sinks)


def ragged(width):
    return mx.arange(KEYS)[None, None, None] <= mx.array([40, KEYS])[:, None, None, None] + (
        mx.arange(width)[None, None, :, None] - width
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size", "group"), SHAPES)
@pytest.mark.parametrize("width", [1, 9])
@pytest.mark.parametrize("mask", [None, "causal", "ragged"])
def test_attention_on_codes_is_attention_on_the_vectors(bits, size, group, width, mask):
    got, true = both(bits, size, group, width, ragged(width) if mask == "ragged" else mask)
    assert mx.allclose(got, true, atol=2e-5), mx.abs(got - true).max()


def test_sinks_are_known():
    got, true = both(8, 64, 64, 3, "causal", sinks=mx.array([0.5, 2.0, -1.0, 3.0, 0.0, 1.0]))
    assert mx.allclose(got, true, atol=2e-5)


def test_sixteen_bit_models_use_mlxs_products():
    got, true = both(8, 64, 64, 3, "causal", dtype=mx.float16)
    assert got.dtype == mx.float16
    assert mx.allclose(got, true, atol=2e-2)


def test_a_wide_chunk_is_spelled_out():
    grid = Grid(8, 64)
    layout = QuantizedLayout(LayerSpec("full"), 9, grid, grid)
    k = mx.random.normal((1, 1, 60, 64))
    asked = []
    layout.attend(lambda q, k, v: asked.append(k.shape), k, grid.pack(k), grid.pack(k), 1.0, None)
    assert asked == [(1, 1, 60, 64)]


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.1)])
def test_codes_are_as_near_as_their_width_allows(bits, most):
    x = mx.random.normal((1, 1, 500, 64))
    grid = Grid(bits, 64)
    error = (grid.spell_out(grid.pack(x)) - x).square().mean().sqrt()
    assert error < most


def test_shapes_are_read_from_signatures():
    shape = shape_of(LayerSpec("full", 0, "full:3x64+3x128:bfloat16"))
    assert (shape.heads, shape.key_size, shape.value_size, shape.item_bytes) == (3, 64, 128, 2)


@pytest.mark.parametrize("bits", [0, 2, 3, 5, 16, -8])
def test_widths_without_a_kernel_are_refused(bits):
    with pytest.raises(OpenError, match=f"bits={bits}: there are kernels for 4 or 8"):
        Affine(bits=bits).open()


def test_groups_mlx_does_not_have_are_refused():
    with pytest.raises(OpenError, match="group_size=48 is not 32, 64 or 128"):
        Affine(group_size=48).open()


def test_heads_that_do_not_divide_are_refused_by_layer(tmp_path):
    target = opened(Tiny(Cpu(), cache_dir=str(tmp_path)))
    with pytest.raises(OpenError, match=r"heads of 16 in layers \[0, 1, 2, 3\].*groups of 64"):
        opened(Affine()).rows(target, 4)
    with pytest.raises(OpenError, match=r"heads of 1 in layers \[0, 1\]"):
        opened(Affine()).rows(opened(Fake(Cpu(), layers=2)), 4)


def test_a_model_with_attention_of_its_own_is_refused(tmp_path):
    target = opened(Tiny(Cpu(), head_size=64, cache_dir=str(tmp_path)))
    assert target.can == {"attend"}
    target.can = frozenset()
    with pytest.raises(OpenError, match="attention by code of its own"):
        opened(Affine()).rows(target, 4)


def test_the_engine_refuses_before_it_serves():
    from support import serving

    with pytest.raises(OpenError, match="heads of 16"), serving("kv=kv8"):
        pass
