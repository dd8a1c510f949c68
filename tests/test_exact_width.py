"""The promise that chunk size, verify width and batch change no bit (float32, Linux x86, our BLAS)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import prompt_ids

from stages.device import Device
from stages.kv.native import Native
from stages.models.smollm2 import Smollm2
from stages.models.tiny import Tiny

# deepseek_v3, falcon_h1, mamba2 and nemotron_h are not here: their code in mlx-lm takes another
# formula for one position than for several, or another one a block of positions.
FAMILIES = ["gemma3", "gemma4", "glm4_moe", "gpt_oss", "llama", "qwen3", "qwen3_5", "qwen3_next"]


@pytest.fixture(scope="module")
def device() -> Device:
    device = Device(threads=1)
    device.open()
    if not device.describe()["exact_width"]:
        pytest.skip("not promised here")
    return device


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, device, tmp_path_factory) -> Iterator[Tiny]:
    part = Tiny(device, family=request.param, cache_dir=str(tmp_path_factory.mktemp("cache")))
    part.open()
    yield part
    part.close()


def hidden(model: Any, passes: list[list[list[int]]]) -> list[np.ndarray]:
    """Hidden states of every row; `passes[i][row]` are the tokens that row gets in pass i."""
    rows = Native().rows(model, 5)
    rows.prepare_append([None] * len(passes[0])).commit()
    found: list[list[np.ndarray]] = [[] for _ in passes[0]]
    for tokens in passes:
        round = rows.begin(tokens)
        states = model.hidden(round.tokens_BW, round.caches)
        round.launch(states)
        round.resolve([len(row) for row in tokens])
        for row, ids in enumerate(tokens):
            found[row].append(np.array(states[row, : len(ids)]))
    return [np.concatenate(row) for row in found]


def chunked(model: Any, tokens: list[int], width: int) -> np.ndarray:
    return hidden(model, [[tokens[i : i + width]] for i in range(0, len(tokens), width)])[0]


def test_any_chunk_size_gives_the_same_bits(tiny):
    tokens = prompt_ids(130)
    whole = chunked(tiny, tokens, 130)
    for width in (41, 7, 1):
        assert np.array_equal(chunked(tiny, tokens, width), whole), width


def test_neighbours_of_other_lengths_change_no_bit(tiny):
    mine, other = prompt_ids(60), prompt_ids(90, seed=1)
    passes = [[mine[:9], other[:50]], [mine[9:20], other[50:57]], [mine[20:], other[57:]]]
    both = hidden(tiny, passes)
    for row, tokens in zip(both, (mine, other), strict=True):
        assert np.array_equal(row, chunked(tiny, tokens, len(tokens)))


@pytest.mark.real
def test_smollm2_gives_the_same_bits(device, tmp_path):
    model = Smollm2(device, cache_dir=str(tmp_path))
    model.open()
    tokens = [(37 * i) % 49152 for i in range(100)]
    whole = chunked(model, tokens, 100)
    for width in (64, 9):
        assert np.array_equal(chunked(model, tokens, width), whole), width
    assert np.array_equal(chunked(model, tokens[:12], 1), whole[:12])
    model.close()
