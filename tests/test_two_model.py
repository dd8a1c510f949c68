"""A second model as drafter: perfect when it is the same, aligned whatever happens, honest about sizes."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from support import prompt_ids, serving, together

from pipeline.errors import OpenError
from pipeline.types import Attachment, LayerSlice, LayerSpec, Segment, State
from stages.drafters.attached import attach, attached
from stages.drafters.two_model import ModelRows, same_tokens
from stages.models.loading.rounding import rounded

SAME = ("flow=speculative", "drafter=two_model", "draft_model=tiny", "depth.max=4")
PROMPTS = [prompt_ids(n, seed=n) for n in (3, 16, 31, 50)]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


def both(family):
    return (f"model.family={family}", f"draft_model.family={family}")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("wanted", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_model_is_always_right(family, wanted):
    """Full accepts leave a token that nobody fed; a drafter that fell behind would begin to err."""
    with serving(*SAME, *both(family), "tier=ram", "debug=small") as engine:
        cold = engine.generate(PROMPTS[3], max_tokens=40, ignore_eos=True, **wanted)
        grown = PROMPTS[3] + cold["token_ids"] + prompt_ids(4, seed=9)
        warm = engine.generate(grown, max_tokens=40, ignore_eos=True, **wanted)
        several = together(engine, PROMPTS[:3], max_tokens=30, ignore_eos=True, **wanted)
        assert warm["cached_tokens"] > 80
        for result in (cold, warm, *several):
            spec = result["speculation"]
            assert spec["accepted"] == spec["drafted"] > 0
        assert engine.stats()["counts"].get("faults", 0) == 0


def test_a_saved_answer_carries_the_drafters_state_too():
    with serving(*SAME, *both("llama"), "tier=ram") as engine:
        first = engine.generate(PROMPTS[3], max_tokens=20, ignore_eos=True)
        before = engine.pipeline.parts["draft_model"].calls
        longer = PROMPTS[3] + first["token_ids"] + prompt_ids(3)
        again = engine.generate(longer, max_tokens=1, ignore_eos=True)
        assert again["cached_tokens"] >= 69
        assert engine.pipeline.parts["draft_model"].calls - before <= 2  # not the whole history


def test_another_models_attachment_is_not_taken():
    array = mx.ones((2, 3, 4))
    spec = LayerSpec("full", 0, "full:2x4:float32")
    segment = Segment(0, 3, (LayerSlice(0, {"keys": array, "values": array}),))
    whole = State((5, 6, 7), "mine", (spec,), (segment,))
    made = attach(whole)
    assert isinstance(made, Attachment)
    back = attached(made, [5, 6, 7, 8], "mine", (spec,))
    assert back is not None and back.tokens == (5, 6, 7)
    assert back.segments[0].layers[0].arrays["values"].tolist() == array.tolist()
    assert attached(made, [5, 6, 7], "another", (spec,)) is None
    assert attached(made, [5, 6], "mine", (spec,)) is None
    assert attached(None, [5, 6, 7], "mine", (spec,)) is None


def model(name, *pieces, identity=""):
    tokenizer = SimpleNamespace(token_bytes=pieces.__getitem__, identity=identity or name)
    return SimpleNamespace(name=name, tokenizer=tokenizer, vocab_size=len(pieces))


def test_tokens_must_mean_the_same_to_both():
    target = model("big", b"a", b"b", b"c")
    same_tokens(target, model("small", b"a", b"b"))
    same_tokens(target, model("small", b"a", b"b", b"c", b"d"))
    same_tokens(target, model("small", b"a", b"b", b""))  # padding
    with pytest.raises(OpenError, match=r"token 1 is b'b' to big and b'x' to small"):
        same_tokens(target, model("small", b"a", b"x", b"c"))
    with (
        pytest.raises(OpenError, match="share a tokenizer"),
        serving(*SAME[:2], "draft_model=fake", recipe="tiny"),
    ):
        pass


@pytest.mark.parametrize("size", [3, 5, 8])
def test_ids_beyond_the_targets_vocabulary_are_never_proposed(size):
    rows = ModelRows.__new__(ModelRows)
    rows._vocab_size = 5
    scores = np.arange(size, dtype=np.float32)
    fitted = rows._fitted(scores)
    assert fitted.shape == (5,)
    assert int(fitted.argmax()) == min(size, 5) - 1
    assert np.isneginf(fitted[size:]).all()


def test_weights_are_billed_and_the_second_model_is_named_where_it_lacks():
    with serving(*SAME, *both("llama")) as engine:
        parts, bill = engine.pipeline.parts, engine.stats()["memory"]["estimate"]
        twice = parts["model"].weight_bytes + parts["draft_model"].weight_bytes
        assert bill["weights_bytes"] == twice
        assert parts["drafter"].bytes_per_token > 0
        assert parts["drafter"].namespace.endswith(parts["draft_model"].artifact)


def test_rounding_finds_weights_that_lie_on_a_grid_and_comes_near_others():
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (8, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    grid = mx.array((codes * 0.37 - 2.0).astype(np.float32))
    assert mx.max(mx.abs(rounded(grid, 4) - grid)).item() < 1e-5
    free = mx.array(random.standard_normal((8, 64)).astype(np.float32))
    errors = [mx.mean(mx.square(rounded(free, bits) - free)).item() for bits in (2, 4, 8)]
    assert 0.2 > errors[0] > 5 * errors[1] > 25 * errors[2] > 0
    assert all(len(np.unique(np.array(rounded(free, 2))[0, :32])) <= 4 for _ in range(1))


@pytest.mark.real
@pytest.mark.parametrize(("bits", "low", "high"), [(4, 0.8, 1.0), (2, 0.2, 0.8)])
def test_smollm2_agrees_with_its_own_rounded_weights(bits, low, high):
    prompt, wanted = "Name three rivers and say where they flow.", {"max_tokens": 40}
    with serving("drafter=none", "flow=plain", "sampler=greedy", recipe="smollm2") as engine:
        plain = engine.generate(prompt, **wanted)["token_ids"]
    settings = ("sampler=greedy", f"draft_model.bits={bits}", "depth.max=2")
    with serving(*settings, recipe="two_model") as engine:
        answer = engine.generate(prompt, **wanted)
    spec = answer["speculation"]
    assert answer["token_ids"] == plain
    assert low < spec["accepted"] / spec["drafted"] < high + 1e-9
