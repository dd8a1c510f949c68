"""Codes: attention on them equals attention on what they stand for; how near they are; what cannot be coded."""

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
from stages.models.loading.cpu_math import attention
from stages.models.tiny import Tiny
from stages.rows.codebook import levels
from stages.rows.codes import Door, pack, unpack
from stages.rows.grid import Grid
from stages.rows.levels import Levels
from stages.rows.quantized import QuantizedLayout
from stages.rows.rows import LayeredRows
from stages.rows.turned import hadamard, hadamard_takes, rotation

SCHEMES = [
    *(Scheme("bits", bits, group) for bits, group in ((8, 64), (4, 32), (3, 64), (6, 32))),
    *(Scheme("bits", bits, 32) for bits in (2, 5)),
    Scheme("bits", 4, 64, rotation="hadamard"),
    *(Scheme("bits", bits, None, True, "qr") for bits in (1, 2, 5, 8)),
    *(Scheme("bits", bits, 32, True, "hadamard") for bits in (3, 4, 7)),
]
B, H, T, R = 2, 2, 70, 3  # rows, heads of keys, keys, queries a head
WIDTHS = (1, 2, 9, 41, 64)


def drawn(*shape, dtype=mx.float32):
    return mx.random.normal(shape).astype(dtype)


def fetched(codec, k, v, counts):
    """What a layer fetches once rows have taken in so many tokens a pass."""
    layout = QuantizedLayout(LayerSpec("full"), 9, codec, codec)
    rows = LayeredRows([layout], (LayerSpec("full"),), 9)
    rows.prepare_append([None] * B).commit()
    at = 0
    for count in counts:
        round = rows.begin([[0] * count] * B)
        got = layout.update_and_fetch(*(x[:, :, at : at + count] for x in (k, v)))
        round.launch()
        round.resolve([count] * B)
        at += count
    return got, layout


def attend(fetched, q, scale, mask):
    keys, values = fetched

    def plain(q, k, v):
        return attention(q, k, v, scale, mask)

    asks = getattr(keys, "attend", None)
    return asks(plain, q, keys, values) if asks else plain(q, keys, values)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_attention_on_codes_is_attention_on_the_vectors(scheme):
    """And a position has the same bits alone, among a few and in a chunk."""
    for size in (64, 256):
        mx.random.seed(3)
        codec = scheme.codec(size, mx.float32)
        k, v, q = drawn(B, H, T, size), drawn(B, H, T, size), drawn(B, H * R, T, size)
        got, layout = fetched(codec, k, v, (T - 4, 1, 3))
        vectors = layout.spelled(layout.encode(k, v))
        for width in WIDTHS:
            asked = q[:, :, -width:]
            out = attend(got, asked, size**-0.5, "causal" if width > 1 else None)
            true = mx.fast.scaled_dot_product_attention(
                asked, *vectors, scale=size**-0.5, mask="causal"
            )
            assert mx.allclose(out, true, atol=2e-5), mx.abs(out - true).max()
            whole = attend(got, q, size**-0.5, "causal")
            assert mx.array_equal(out, whole[:, :, -width:])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("size", [64, 96, 256])
def test_our_blas_spells_out_what_mlx_does(scheme, size):
    codec = scheme.codec(size, mx.float32)
    inner = getattr(codec, "inner", codec)
    if size % inner.group:
        return
    rows = codec.pack(drawn(B, H, T, size))
    assert inner._door.is_open
    got = codec.spell_out(mx.concatenate([rows, rows], axis=2)[:, :, T // 2 : T])
    inner._door.is_open = False
    assert mx.allclose(got, codec.spell_out(rows)[:, :, T // 2 :], atol=1e-6)


def test_without_our_blas_the_door_is_shut(monkeypatch):
    monkeypatch.setattr(Door, "_ask", lambda self, rows: rows @ self.header + mx.nan)
    assert not Grid(8, 64, 64, mx.float32)._door.is_open
    assert not Levels(
        8, 8, 8, mx.float32
    )._door.is_open  # its levels find no room in a header either


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_sixteen_bit_models_keep_their_type(scheme):
    for dtype in (mx.float16, mx.bfloat16):
        codec, x = scheme.codec(64, dtype), drawn(B, H, T, 64, dtype=dtype)
        spelled = codec.unturn(codec.spell_out(codec.pack(x)))
        exact, y = scheme.codec(64, mx.float32), x.astype(mx.float32)
        wanted = exact.unturn(exact.spell_out(exact.pack(y)))
        assert spelled.dtype == dtype
        error, least = ((z - y).square().mean().sqrt().item() for z in (spelled, wanted))
        assert error < 1.1 * least + 0.02


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_what_is_stored_takes_the_bytes_of_the_formula(scheme, dtype):
    packed = scheme.codec(128, dtype).pack(drawn(1, 2, 5, 128, dtype=dtype))
    assert packed.nbytes == 10 * scheme.vector_bytes(128, dtype.size)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.006), (4, 0.1)])
def test_codes_are_as_near_as_their_width_allows(bits, most):
    x = mx.random.normal((1, 1, 500, 64))
    grid = Grid(bits, 64, 64, mx.float32)
    error = (grid.spell_out(grid.pack(x)) - x).square().mean().sqrt()
    assert error < most


def test_shapes_are_read_from_signatures():
    shape = shape_of(LayerSpec("full", 0, "full:3x64+3x128:bfloat16"))
    assert (shape.heads, shape.key_size, shape.value_size, shape.item_bytes) == (3, 64, 128, 2)
    assert shape.dtype == mx.bfloat16


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
        opened(Rotated()).rows(target, 4)
    assert opened(Affine()).rows(target, 4).size == 0  # it is given plain arrays


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
        codec = Levels(bits, size, size, mx.float32)
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
    packed = pack(codes, bits)
    assert packed.nbytes == 3 * 64 * bits // 8
    assert mx.array_equal(unpack(packed, bits, 64).astype(mx.uint8), codes)
