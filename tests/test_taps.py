"""What drafters see of a target: layer outputs, the state after the last norm, embeddings."""

from __future__ import annotations

import mlx.core as mx
import pytest
from targets import TOKENS, Cpu, caches, opened

from pipeline.errors import OpenError
from pipeline.types import AFTER_NORM, EMBEDDING
from stages.models.loading.families import FAMILIES
from stages.models.tiny import Tiny

SCALED = {"gemma3": 8.0, "gemma4": 8.0}  # by sqrt(hidden_size)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tiny"))
    return opened(Tiny(Cpu(), family=request.param, cache_dir=folder))


def test_taps_are_what_the_layers_return(target):
    """The last layer's output, normed, is what the head gets; tapping changes nothing."""
    plain = target.hidden(TOKENS, caches(target))
    last = target.layer_count - 1
    hidden, seen = target.tapped(TOKENS, caches(target), (EMBEDDING, 0, last, AFTER_NORM))
    assert mx.array_equal(hidden, plain)
    embedded, first, final, normed = mx.split(seen, 4, axis=-1)
    assert mx.array_equal(normed, plain)
    norm = next(n for n in ("norm", "norm_f", "final_layernorm") if n in target._split.trunk)
    assert mx.allclose(target._split.trunk[norm](final), plain, atol=1e-6)
    assert mx.array_equal(embedded, target.embed(TOKENS))
    assert not mx.array_equal(first, final)


def test_embeddings_carry_the_familys_multiplier(target):
    name = target.name.removeprefix("tiny-")
    trunk = target._split.trunk
    table = (trunk["embed_tokens"] if "embed_tokens" in trunk else trunk["embeddings"]).weight
    factor = SCALED.get(name, 1.0)
    assert mx.allclose(target.embed(TOKENS), table[TOKENS] * factor, atol=1e-6)
    assert target.embed(TOKENS).shape == (1, TOKENS.shape[1], target.hidden_size)


def test_a_layer_that_is_not_there_is_named(target):
    with pytest.raises(OpenError, match=r"no tap \[77\]"):
        target.tapped(TOKENS, None, (0, 77))
