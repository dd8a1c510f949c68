"""Codes: products on them equal products on what they stand for; how near they are; what cannot be coded."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from targets import Cpu, opened

from pipeline.build import build
from pipeline.errors import OpenError
from pipeline.types import LayerSpec
from stages.kv.affine import Affine
from stages.kv.rotated import Rotated
from stages.kv.scheme import Scheme
from stages.kv.shapes import shape_of
from stages.kv.turboquant import TurboQuant
from stages.models.fake import Fake
from stages.models.tiny import Tiny
from stages.rows.bits import BitPacking
from stages.rows.codebook import levels
from stages.rows.grid import Grid
from stages.rows.levels import Levels
from stages.rows.quantized import QuantizedLayout
from stages.rows.turned import hadamard, hadamard_takes, rotation

HEADS, KEYS = 2, 70
GRID = Grid(8, 64)
SCHEMES = [
    *(Scheme("bits", bits, group) for bits, group in ((8, 64), (4, 32), (3, 64), (6, 32))),
    Scheme("bits", 4, 64, rotation="hadamard"),
    *(Scheme("bits", bits, None, True, "qr") for bits in (1, 2, 5)),
    *(Scheme("bits", bits, 32, True, "hadamard") for bits in (3, 4, 7)),
]


def plain(q, k, v, scale, mask, sinks=None):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def both(codec, size, width, mask, sinks=None, dtype=mx.float32):
    """Attention on codes, and on the vectors spelled out."""
    mx.random.seed(3)
    layout = QuantizedLayout(LayerSpec("full"), 9, codec, codec)
    k, v = (mx.random.normal((2, HEADS, KEYS + 9, size)).astype(dtype) for _ in range(2))
    q = mx.random.normal((2, HEADS * 3, width, size)).astype(dtype)
    asked = q * 1
    keys, values = (tuple(a[:, :, :KEYS] for a in codec.pack(x)) for x in (k, v))
    got = layout.attend(None, q, keys, values, size**-0.5, mask, sinks)
    assert mx.array_equal(q, asked)  # the caller's queries are left alone
    vectors = codec.spell_out(keys), codec.spell_out(values)
    return got, plain(q, *vectors, size**-0.5, mask, sinks)


def ragged(width):
    return mx.arange(KEYS)[None, None, None] <= mx.array([40, KEYS])[:, None, None, None] + (
        mx.arange(width)[None, None, :, None] - width
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("width", [1, 9])
@pytest.mark.parametrize("mask", [None, "causal", "ragged"])
def test_attention_on_codes_is_attention_on_the_vectors(scheme, width, mask):
    for size in (64, 256):
        codec = scheme.codec(size)
        got, true = both(codec, size, width, ragged(width) if mask == "ragged" else mask)
        assert mx.allclose(got, true, atol=2e-5), mx.abs(got - true).max()


def test_sinks_are_known():
    got, true = both(GRID, 64, 3, "causal", sinks=mx.array([0.5, 2.0, -1.0, 3.0, 0.0, 1.0]))
    assert mx.allclose(got, true, atol=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_sixteen_bit_models_keep_their_type(scheme):
    got, true = both(scheme.codec(64), 64, 3, "causal", dtype=mx.float16)
    assert got.dtype == true.dtype == mx.float16
    assert mx.allclose(got, true, atol=2e-2)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_stored_takes_the_bytes_of_the_formula(scheme):
    packed = scheme.codec(128).pack(mx.random.normal((1, 2, 5, 128)))
    assert sum(array.nbytes for array in packed) == 10 * scheme.vector_bytes(128, 4)


def test_a_wide_chunk_is_spelled_out():
    grid = GRID
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


@pytest.mark.parametrize("bits", [0, 1, 7, 16, -8])
def test_widths_without_a_kernel_are_refused(bits):
    said = f"bits: there are kernels for 2, 3, 4, 5, 6 or 8 bits, not for {bits}"
    with pytest.raises(ValueError, match=said):
        Affine(bits=bits)
    with pytest.raises(ValueError, match=f"k_{said}"):
        TurboQuant(k_bits=bits)
    with pytest.raises(ValueError, match=f"v_{said}"):
        Rotated(v_bits=bits)


def test_levels_have_kernels_for_one_to_eight_bits():
    assert TurboQuant(keys="rotated", k_bits=1, v_bits=8).keys.group is None
    for bits in (0, 9):
        with pytest.raises(ValueError, match=f"1, 2, 3, 4, 5, 6, 7 or 8 bits, not for {bits}"):
            TurboQuant(keys="rotated", k_bits=bits)


def test_groups_mlx_does_not_have_are_refused():
    with pytest.raises(ValueError, match="group_size: wants 32, 64 or 128, got 48"):
        Affine(group_size=48)


def test_check_refuses_them_too():
    from pipeline.compose import compose
    from pipeline.errors import ConfigError
    from pipeline.plan import plan

    with pytest.raises(ConfigError, match=r"kv\.bits: there are kernels for"):
        build(plan(compose("tiny", ["kv=kv8", "kv.bits=7"])))


def test_heads_that_do_not_divide_are_refused_by_layer(tmp_path):
    target = opened(Tiny(Cpu(), cache_dir=str(tmp_path)))
    with pytest.raises(
        OpenError, match=r"heads of 16 do not .*groups of 64, in layers \[0, 1, 2, 3\]"
    ):
        opened(Affine()).rows(target, 4)
    with pytest.raises(OpenError, match=r"heads of 1 do not .* in layers \[0, 1\]"):
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


def test_heads_without_a_hadamard_matrix_are_refused(tmp_path):
    target = opened(Tiny(Cpu(), head_size=160, cache_dir=str(tmp_path)))  # 20 * 8: it has one
    assert opened(TurboQuant()).rows(target, 4).size == 0
    target = opened(Tiny(Cpu(), head_size=288, cache_dir=str(tmp_path)))  # 9 * 32
    with pytest.raises(OpenError, match=r"heads of 288 have no Hadamard matrix"):
        opened(TurboQuant()).rows(target, 4)
    assert opened(TurboQuant(rotation="qr")).rows(target, 4).size == 0


def test_codebooks_are_those_of_the_exact_density():
    """In the limit of long vectors it is normal: the levels of Max (1960). Others, computed apart."""
    max_1960 = (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)
    assert levels(4, 100_000)[8:] * 100_000**0.5 == pytest.approx(max_1960, abs=5e-4)
    for size, positive in ((64, (0.2437, 0.7505, 1.3292, 2.1112)), (128, (0.2444, 0.7532, 1.3365))):
        assert levels(3, size)[4 : 4 + len(positive)] * size**0.5 == pytest.approx(
            positive, abs=5e-4
        )
    assert (levels(8, 128) == -levels(8, 128)[::-1]).all()


@pytest.mark.parametrize(
    ("size", "errors"),
    [(64, (0.3584, 0.1145, 0.0334, 0.0091)), (128, (0.3609, 0.1160, 0.0340, 0.0093))],
)
def test_error_of_levels_on_the_sphere_and_on_single_coordinates(size, errors):
    """Squared error of unit vectors: uniform ones within 1 %; those of one coordinate are as good once
    rotated, over 200 rotations."""
    draw = np.random.default_rng(5)
    x = draw.standard_normal((20_000, size))
    sphere = mx.array((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32))[None, None]
    lone = np.eye(size, dtype=np.float32)[:: size // 8]
    most = {"qr": 0.02, "hadamard": 0.5 if size == 64 else 0.15}
    turned = {
        kind: mx.array(
            np.stack([lone @ rotation(kind, size, seed) for seed in range(200)]).astype(np.float32)
        )
        for kind in most
    }
    for bits, error in enumerate(errors, 1):
        codec = Levels(bits, size)
        assert squared(codec, sphere) == pytest.approx(error, rel=0.01)
        for kind, vectors in turned.items():
            mean = squared(codec, vectors[None])
            assert mean == pytest.approx(error, rel=most[kind]), (bits, kind)


def squared(codec, x_BHTD):
    return (codec.spell_out(codec.pack(x_BHTD)) - x_BHTD).square().sum(-1).mean().item()


def test_hadamard_matrices_are_orthogonal():
    for size in (1, 2, 12, 20, 28, 64, 80, 96, 112, 256):
        matrix = hadamard(size)
        assert set(np.unique(matrix)) <= {-1, 1}
        assert (matrix @ matrix.T == size * np.eye(size)).all()
    assert not any(map(hadamard_takes, (0, 36, 72, 100, 576)))


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_packed_tightly_and_read_back(bits):
    codes = mx.random.randint(0, 2**bits, (3, 64)).astype(mx.uint8)
    packing = BitPacking(bits)
    packed = packing.pack(codes)
    assert packed.nbytes == 3 * 64 * bits // 8
    table = packing.table(np.arange(2**bits))
    assert mx.array_equal(table[packing.indices(packed)].flatten(-2), codes.astype(mx.float32))
