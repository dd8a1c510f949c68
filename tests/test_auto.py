"""A folder says what family it is of."""

from __future__ import annotations

import mlx.core as mx
import pytest
from neural import GOLDEN, seen_by, with_config
from support import prompt_ids, serving
from tiny_drafters import TINY, tiny_checkpoint

from pipeline.errors import OpenError
from stages.drafters.auto import Auto, recognised
from stages.drafters.neural.checkpoint import Checkpoint, read


@pytest.mark.parametrize("folder", sorted(p.name for p in GOLDEN.iterdir()))
def test_published_layouts_are_recognised(folder):
    family, why = recognised(read(GOLDEN / folder))
    assert folder.startswith({"assistant": "gemma4_assistant"}.get(family, family))
    assert "config says" in why and "tensors are" in why


@pytest.mark.parametrize("kind", sorted(TINY))
def test_tiny_ones_are_too(kind, tmp_path):
    place = next(word for word in tiny_checkpoint(kind, tmp_path) if "drafter.path" in word)
    family, _ = recognised(read(place.partition("=")[2]))
    assert kind.startswith(family)


def test_deepspecs_dflash_is_shifted_and_so_dspark():
    config = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}
    names = ("fc.weight", "hidden_norm.weight", "embed_tokens.weight", "lm_head.weight")
    found = Checkpoint(GOLDEN, config, {name: mx.zeros(1) for name in names})
    assert recognised(found)[0] == "dspark"


def test_what_is_no_drafter_is_told_what_to_type(tmp_path):
    whole = Checkpoint(GOLDEN, {"model_type": "llama"}, {"model.layers.0.x": mx.zeros(1)})
    with pytest.raises(OpenError, match=r"'llama'[\s\S]*drafter=two_model[\s\S]*eagle3, mtp"):
        recognised(whole)
    with pytest.raises(OpenError, match="is DFlash2, which is not supported"):
        recognised(Checkpoint(GOLDEN, {"architectures": ["DFlash2DraftModel"]}, {}))
    wrong = with_config(GOLDEN / "eagle3_safeai", tmp_path / "x")
    with pytest.raises(OpenError, match="made for 96, some model has 144"):
        Auto(seen_by(48, 60), path=str(wrong)).open()


def test_it_serves_as_the_family_would(tmp_path):
    model, _, path = tiny_checkpoint("eagle3", tmp_path)
    asked = {"max_tokens": 12, "ignore_eos": True}
    answers = []
    for drafter in ("auto", "eagle3"):
        with serving(
            model, "flow=speculative", f"drafter={drafter}", path, "depth.max=3"
        ) as engine:
            answers.append(engine.generate(prompt_ids(9), **asked))
            assert engine.pipeline.parts["drafter"].namespace.startswith("eagle3:")
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["speculation"] == answers[1]["speculation"]
