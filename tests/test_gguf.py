"""GGUF files: header, block types, names and rows, packed and dequantized weights."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf_files import to_gguf
from targets import Cpu, opened, scores

from pipeline.errors import OpenError
from pipeline.types import Sampling
from stages.models.gguf import Gguf
from stages.models.loading.gguf_quants import dequantize
from stages.models.loading.gguf_reader import read
from stages.models.tiny import Tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def folder(cache):
    return Tiny(Cpu(), cache_dir=cache).locate()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gguf_is_the_checkpoint_it_was_made_of(family, cache, tmp_path):
    source = opened(Tiny(Cpu(), family=family, cache_dir=cache))
    path = to_gguf(source.locate(), tmp_path / "m.gguf", family)
    target = opened(Gguf(Cpu(), path=str(path), cache_dir=cache))
    assert mx.allclose(scores(target), scores(source), atol=1e-5)
    assert target.specs == source.specs and target.eos_ids == source.eos_ids
    assert (target.context_len, target.name) == (4096, "m")
    assert target.generation == Sampling(temperature=0.5)
    text = "the rain, 12 times"
    assert target.tokenizer.encode(text) == source.tokenizer.encode(text)
    user = [{"role": "user", "content": text}]
    assert target.tokenizer.render(user, {}) == source.tokenizer.render(user, {})


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_compute_what_dequantized_ones_do(kind, folder, cache, tmp_path):
    path = to_gguf(folder, tmp_path / "m.gguf", "llama", kind)
    plain = opened(Gguf(Cpu(), path=str(path), cache_dir=cache))
    packed = opened(Gguf(Cpu("as_is"), path=str(path), cache_dir=cache))
    assert mx.allclose(scores(packed), scores(plain), atol=1e-3)
    assert packed.weight_bytes < plain.weight_bytes / 2 and packed.artifact != plain.artifact
    assert packed.dtype == plain.dtype == "float32"
    assert f"Weights (F32 and {kind}) were dequantized to float32" in plain.notes[0]
    assert packed.notes[:2] == [
        f"Weights stay as stored (F32 and {kind}).",
        "The scales of quantized weights were cast from float16 to float32.",
    ]


def test_types_mlx_does_not_know_are_dequantized(folder, cache, tmp_path):
    path = to_gguf(folder, tmp_path / "m.gguf", "llama", "Q5_0")
    target = opened(Gguf(Cpu("as_is"), path=str(path), cache_dir=cache))
    assert "MLX has no packed form for all of them" in target.notes[0]


def test_every_common_block_type_equals_the_gguf_package(tmp_path):
    """On random bytes, so that every bit of a block matters."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    kinds = ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "BF16", "F16", "Q5_K"]
    random, blocks = np.random.default_rng(0), {}
    for kind in kinds:
        size = quants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
        blocks[kind] = random.integers(0, 60, (32, size * 4), np.uint8)
    writer = GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    for kind, data in blocks.items():
        writer.add_tensor(kind, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read(tmp_path / "q.gguf")
    for kind, data in blocks.items():
        expected = quants.dequantize(data, GGMLQuantizationType[kind])
        assert np.array_equal(dequantize(file, kind), expected), kind


def test_damaged_and_foreign_files(folder, tmp_path, cache):
    path = to_gguf(folder, tmp_path / "m.gguf", "llama")
    whole = path.read_bytes()
    for data, message in [
        (b"", "no readable GGUF"),
        (b"PK\x03\x04" * 9, "does not start with the letters GGUF"),
        (whole[:3000], "cut short|no readable GGUF"),
        (whole[:-100], r"cut short: [\d,]+ bytes of [\d,]+"),
        (b"GGUF\x01\x00\x00\x00" + bytes(40), "version 1 is not 2 or 3"),
    ]:
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(OpenError, match=message):
            Gguf(Cpu(), path=str(tmp_path / "bad.gguf"), cache_dir=cache).open()
    mamba = whole.replace(b"llama", b"mamba")
    (tmp_path / "bad.gguf").write_bytes(mamba)
    with pytest.raises(
        OpenError, match=r"architecture 'mamba'; supported are \['gemma3', 'llama'\]"
    ):
        Gguf(Cpu(), path=str(tmp_path / "bad.gguf"), cache_dir=cache).open()
    odd = whole.replace(b"blk.0.attn_q", b"blk.0.attn_z")
    (tmp_path / "bad.gguf").write_bytes(odd)
    with pytest.raises(OpenError, match=r"1 tensors of the file are unknown .*blk\.0\.attn_z"):
        Gguf(Cpu(), path=str(tmp_path / "bad.gguf"), cache_dir=cache).open()
    with pytest.raises(OpenError, match="No such file"):
        Gguf(Cpu(), path=str(tmp_path / "absent.gguf")).open()
