"""Saved files: what is written comes back to the bit, and what was changed is never taken for it."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from pipeline.types import LayerSpec
from stages.tiers.saved import format as form
from stages.tiers.saved.payload import DTYPES, flatten, map_arrays, rebuild, to_host

KEY = np.arange(5, dtype=np.int32).tobytes()


def write(path, payload, **fields):
    """A run of five tokens with this payload; what was written."""
    arrays: list = []
    structure = flatten(payload, arrays)
    specs = (LayerSpec("full", 0, "full:1x2:float32"), LayerSpec("sliding", 4, "x", 1))
    header = form.Header(
        "run", "n", "", 0, 5, KEY, form.chain_of("n", KEY), specs, structure=structure
    )
    hosts = to_host(arrays)
    with path.open("wb", buffering=0) as file:
        written = form.write(file, replace(header, **fields), hosts)
    assert path.stat().st_size == form.file_size(header, hosts)
    return written


def read(path):
    header, arrays = form.read_file(path)
    return header, map_arrays(rebuild(header.structure, arrays), lambda a: a.to_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", ["whole", "tokens", "dims", "none"])
def test_every_type_and_shape_comes_back(tmp_path, dtype, part):
    base = (mx.random.uniform(shape=(3, 8, 4)) * 100).astype(dtype)
    array = {"whole": base, "tokens": base[:, 2:7], "dims": base[:, :, 1:3], "none": base[:, :0]}
    payload = {0: {"keys": array[part]}, 1: [None, (1.5, "x", True), [array[part]], b"\0\1"]}
    header = write(tmp_path / "f", payload)
    again, got = read(tmp_path / "f")
    assert again == header
    assert got[1][:2] == [None, (1.5, "x", True)]
    assert got[1][3] == b"\0\1"
    for mine in (got[0]["keys"], got[1][2][0]):
        assert mine.dtype == dtype
        assert mine.shape == array[part].shape
        assert mx.array_equal(mine, array[part])


def test_any_reader_of_safetensors_can_read_it(tmp_path):
    array = mx.arange(12, dtype=mx.float32).reshape(2, 3, 2)
    write(tmp_path / "f", {0: {"keys": array, "values": array[:, :, ::-1]}})
    with safe_open(tmp_path / "f", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("t0"), np.array(array))
        assert set(file.metadata()) == {"headrace", "digest"}


def mutants(original: bytes, count: int):
    """Changed copies: cut, lengthened, bits flipped, bytes moved, runs zeroed, two files mixed."""
    rng = random.Random(0)
    for _ in range(count):
        data, at = bytearray(original), rng.randrange(len(original))
        kind = rng.choice(["cut", "longer", "flip", "byte", "swap", "zero", "header"])
        if kind == "cut":
            data = data[:at]
        elif kind == "longer":
            data += bytes(rng.randrange(1, 99))
        elif kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            data[at] = rng.randrange(256)
        elif kind == "header":
            data[rng.randrange(8)] = rng.randrange(256)
        else:
            other = rng.randrange(len(data))
            low, high = min(at, other), max(at, other)
            data[low:high] = bytes(high - low) if kind == "zero" else data[low:high][::-1]
        yield bytes(data)


def test_two_thousand_changed_files_are_only_misses(tmp_path):
    payload = {0: {"keys": mx.arange(40, dtype=mx.float32).reshape(2, 5, 4) + 1}}
    path = tmp_path / "f"
    header = write(path, payload)
    original, misses = path.read_bytes(), 0
    for data in mutants(original, 2200):
        path.write_bytes(data)
        try:
            again, got = read(path)
        except form.BadFileError:
            misses += 1
            continue
        assert again == header, "what is accepted says the same"
        assert mx.array_equal(got[0]["keys"], payload[0]["keys"])
    assert misses >= 2000


@pytest.mark.parametrize(
    "change",
    [
        {"format": "2"}, {"kind": "code"}, {"start": -1}, {"stop": 4}, {"key": "%"}, {"crcs": [5]},
        {"specs": [[1, 2, 3, 4, 5, 6]]}, {"more": 1}, {"parent": 7}, {"namespace": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_is_no_header_of_ours_is_refused(tmp_path, change):
    import json

    text = write(tmp_path / "f", {}).as_text()
    assert form.Header.from_text(text).key == KEY
    with pytest.raises(form.BadFileError):
        form.Header.from_text(json.dumps({**json.loads(text), **change}))


def test_another_version_is_told_apart_from_a_broken_file(tmp_path):
    import json

    fields = json.loads(write(tmp_path / "f", {}).as_text())
    with pytest.raises(form.OtherFormatError, match="format 2, not 1"):
        form.Header.from_text(json.dumps({**fields, "format": 2}))


def test_links_are_not_followed(tmp_path):
    write(tmp_path / "f", {})
    (tmp_path / "g").symlink_to(tmp_path / "f")
    with pytest.raises(form.BadFileError, match="cannot be opened"):
        form.read_file(tmp_path / "g")
