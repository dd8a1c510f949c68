"""Gemma 4 assistants against the reference's numbers, and whose keys they are given."""

from __future__ import annotations

import mlx.core as mx
import pytest
from neural import GOLDEN, close, golden, seen_by, with_config
from support import prompt_ids, serving

from pipeline.errors import OpenError
from pipeline.types import LayerSpec
from stages.drafters.assistant import Assistant
from stages.drafters.neural.tiny import checkpoint

SPECS = (
    LayerSpec("sliding", 5, "sliding:2x16:float32"),
    LayerSpec("full", 0, "full:1x32:float32"),
    LayerSpec("sliding", 5, "sliding:2x16:float32"),
    LayerSpec("full", 0, "full:1x32:float32"),
)


@pytest.mark.parametrize("name", ["gemma4_assistant", "gemma4_assistant_ordered"])
def test_one_step_is_the_references(name):
    """The reference shows a sliding layer window + 1 = 6 of the 11 keys."""
    want = golden(name)
    drafter = Assistant(seen_by(48, 64, specs=SPECS), path=str(GOLDEN / name))
    drafter.open()
    assert drafter.donors == {"sliding": 2, "full": 3}
    embedded, state = mx.split(want["in.embed_and_hidden"][None], 2, axis=-1)
    last_six = (mx.arange(11) >= 5)[None, None, None]
    donated = {
        "sliding": (want["in.k_sliding"], want["in.v_sliding"], last_six),
        "full": (want["in.k_full"], want["in.v_full"], mx.array(True)[None, None, None]),
    }
    offset = want["in.position"].astype(mx.int32)
    normed = drafter.model.step(embedded, state, donated, offset)
    assert close(drafter.model.back(normed)[0, 0], want["out.hidden_backbone"])
    scores = drafter.model.scores(normed)
    assert close(scores[0, 0], want["out.logits"])


def test_it_drafts_past_the_window_and_over_coded_keys(tmp_path):
    """Window 12, a prompt of 300, keys and values as 8-bit codes (which want heads of 32)."""
    place = checkpoint("assistant", "gemma4", tmp_path, head_size=32)
    chosen = ("drafter=assistant", f"drafter.path={place}")
    model = ("model.family=gemma4", "model.head_size=32", "tier=none")
    model = (*model, "kv=kv8", "kv.group_size=32")
    with serving(*model, "flow=plain", "drafter=none") as engine:
        plain = engine.generate(prompt_ids(300), max_tokens=12, ignore_eos=True)
    with serving(*model, *chosen, "flow=speculative", "depth.max=3") as engine:
        ours = engine.generate(prompt_ids(300), max_tokens=12, ignore_eos=True)
    assert ours["token_ids"] == plain["token_ids"]
    assert ours["speculation"]["drafted"] > 20


def test_an_assistant_of_another_size_says_both_numbers(tmp_path):
    path = str(GOLDEN / "gemma4_assistant")
    with pytest.raises(OpenError, match=r"backbone hidden size.*48, some model has 64"):
        Assistant(seen_by(64, 64, specs=SPECS), path=path).open()
    other = (LayerSpec("sliding", 5, "sliding:3x8:float32"), SPECS[1])
    with pytest.raises(OpenError, match=r"(?s)head size of sliding layers.*16, some model has 8"):
        Assistant(seen_by(48, 64, specs=other), path=path).open()
    with pytest.raises(OpenError, match="reads sliding layers; some model has none"):
        Assistant(seen_by(48, 64, specs=SPECS[1:2]), path=path).open()
    changed = with_config(GOLDEN / "gemma4_assistant", tmp_path / "x", use_ordered_embeddings=True)
    with pytest.raises(OpenError, match=r"missing masked_embedding\.centroids\.weight \(8, 32\)"):
        Assistant(seen_by(48, 64, specs=SPECS), path=str(changed)).open()
