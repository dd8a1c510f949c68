"""DFlash and DSpark against the reference implementations' numbers, and numpy where there are none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from by_numpy import attend, rms, swiglu, turned
from neural import GOLDEN, close, golden, seen_by, with_config

from pipeline.errors import OpenError
from stages.drafters.dflash import DFlash, flat, tap_ids
from stages.drafters.dspark import DSpark
from stages.drafters.neural.blockwise import _Fill
from stages.drafters.neural.checkpoint import Checkpoint, read
from stages.drafters.neural.tiny import checkpoint

GEMMA = ("dspark_gemma4", "dspark_gemma4_keqv")
QWEN = ("dspark_qwen3_vanilla", "dspark_qwen3_gated", "dspark_qwen3_rnn")


def opened(drafter):
    drafter.open()
    rows = drafter.rows(drafter._target, 4)
    return drafter.model, rows


def rounds(rows, want):
    """Each golden round: (its answers, the block's states)."""
    rows.prepare_append([[]], [None]).commit()
    for name in ("round0", "round1"):
        taps = want[f"{name}.in.taps"]
        assert int(want[f"{name}.in.start"].item()) == rows.rows[0].length + len(taps)
        rows.consume([[0] * len(taps)], taps[None])
        rows.flush()
        anchor = int(want[f"{name}.in.anchor"].item())
        answers = {k.removeprefix(f"{name}.out."): v for k, v in want.items() if name in k}
        yield answers, rows.block([anchor]), anchor


@pytest.mark.parametrize("name", [*GEMMA, *QWEN])
def test_two_rounds_are_the_references(name):
    model, rows = opened(DSpark(seen_by(32, 50), path=str(GOLDEN / name)))
    for answers, states, anchor in rounds(rows, golden(name)):
        assert close(states[0], answers["hidden"])
        base = answers.get("logits", answers.get("base_logits"))
        assert close(model.scores(states)[0], base)
        if "tokens_greedy" in answers:
            ids, sure = _Fill(model, [None], [9])(mx.array([anchor]), states)
            assert ids[0].tolist() == answers["tokens_greedy"].tolist()
            assert close(sure[0], mx.sigmoid(answers["confidence_logits"]))


def test_copies_of_the_targets_embedding_and_head_are_not_kept():
    raw = mx.load(str(GOLDEN / QWEN[0] / "model.safetensors"))
    tables = raw["embed_tokens.weight"], raw["lm_head.weight"]
    target = seen_by(32, 50)
    target.embed, target.head = (lambda ids: tables[0][ids]), (lambda h: h @ tables[1].T)
    drafter = DSpark(target, path=str(GOLDEN / QWEN[0]))
    model, rows = opened(drafter)
    kept = sum(array.nbytes for array in raw.values()) - sum(table.nbytes for table in tables)
    assert drafter.weight_bytes == kept
    answers, states, _ = next(rounds(rows, golden(QWEN[0])))
    assert close(model.scores(states)[0], answers["base_logits"])


def test_a_threshold_cuts_where_the_head_is_unsure():
    folder, want = str(GOLDEN / QWEN[1]), golden(QWEN[1])
    sure = np.array(mx.sigmoid(want["round0.out.confidence_logits"]))
    at = int(np.argmin(sure[:6]))
    _, rows = opened(DSpark(seen_by(32, 50), path=folder, threshold=float(sure[at]) + 1e-4))
    taps, anchor = want["round0.in.taps"], int(want["round0.in.anchor"].item())
    rows.prepare_append([[]], [None]).commit()
    rows.consume([[0] * len(taps)], taps[None])
    (proposal,) = rows.draft([anchor], [6], [None])
    first = int(np.argmax(sure < sure[at] + 1e-4))
    assert proposal == want["round0.out.tokens_greedy"].tolist()[:first]
    assert np.allclose(proposal.confidence, sure[:first], atol=1e-4)


def by_numpy(w, config, ids, context, held):
    """z-lab's block from its description; the second layer looks back within a window."""
    eps, size = config["rms_norm_eps"], 16
    shown = rms(context @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = w["table"][ids]
    length = held + len(ids)
    query, key = held + np.arange(len(ids))[:, None], np.arange(length)[None]
    for layer, causal in enumerate((True, False)):
        at = f"layers.{layer}."

        def heads(y, name, count, at=at):
            return (y @ w[f"{at}self_attn.{name}.weight"].T).reshape(len(y), count, size)

        a = rms(x, w[f"{at}input_layernorm.weight"], eps)
        rows = np.concatenate([shown, a])
        q = rms(heads(a, "q_proj", 4), w[f"{at}self_attn.q_norm.weight"], eps)
        k = rms(heads(rows, "k_proj", 2), w[f"{at}self_attn.k_norm.weight"], eps)
        q = turned(q, size, config["rope_theta"], first=held)
        k = turned(k, size, config["rope_theta"])
        seen = (key <= query) & (key > query - 6) if causal else np.ones(1, bool)
        v = heads(rows, "v_proj", 2)
        out = attend(q, np.repeat(k, 2, 1), np.repeat(v, 2, 1), size**-0.5, seen)
        x = x + out @ w[f"{at}self_attn.o_proj.weight"].T
        normed = rms(x, w[f"{at}post_attention_layernorm.weight"], eps)
        x = x + swiglu(normed, w, f"{at}mlp")
    return rms(x, w["norm.weight"], eps)


def test_an_unshifted_block_is_what_its_description_says(tmp_path):
    """Nested settings, a window, the target's embedding and head; row j is for position j."""
    folder = checkpoint("dflash", "llama", tmp_path)
    random = np.random.default_rng(3)
    table = random.standard_normal((279, 64), np.float32)
    target = SimpleNamespace(
        name="t", hidden_size=64, vocab_size=279, layer_count=4,
        embed=lambda ids: mx.array(table)[ids], head=lambda h: h @ mx.array(table).T,
    )  # fmt: skip
    drafter = DFlash(target, path=str(folder))
    _, rows = opened(drafter)
    assert drafter.taps == (0, 2, 3)
    context = random.standard_normal((9, 192), np.float32)
    rows.prepare_append([[]], [None]).commit()
    rows.consume([[0] * 9], mx.array(context)[None])
    config = json.loads((folder / "config.json").read_text())
    raw = mx.load(str(folder / "model.safetensors"))
    weights = {k: np.array(v) for k, v in raw.items()} | {"table": table}
    expected = by_numpy(weights, config, [17, 278, 278, 278, 278], context, 9)
    rows.flush()
    assert close(rows.block([17])[0], expected[1:])
    (proposal,) = rows.draft([17], [8], [None])
    assert proposal == (expected[1:] @ table.T).argmax(-1).tolist()


def test_default_taps_are_spread_over_the_layers():
    """The published files' numbers."""
    known = {
        (36, 5): (1, 9, 17, 25, 33), (32, 5): (1, 8, 15, 22, 29), (48, 5): (1, 12, 23, 34, 45),
        (40, 8): (1, 6, 11, 16, 22, 27, 32, 37), (28, 5): (1, 7, 13, 19, 25), (12, 1): (6,),
    }  # fmt: skip
    for (layers, count), ids in known.items():
        assert tap_ids(Checkpoint(GOLDEN, {"num_hidden_layers": count}, {}), layers) == ids


def test_what_stands_at_the_top_wins():
    nested = {"block_size": 8, "mask_token_id": 3}
    found = Checkpoint(GOLDEN, {"block_size": 16, "dflash_config": nested}, {})
    assert flat(found).config["block_size"] == 16
    assert flat(found).config["mask_token_id"] == 3


def test_wrong_files_are_refused(tmp_path):
    qwen = GOLDEN / QWEN[0]
    with pytest.raises(OpenError, match="take drafter=dspark"):
        DFlash(seen_by(32, 50), path=str(qwen)).open()
    with pytest.raises(OpenError, match=r"layers: .*made for 36, some model has 8"):
        DSpark(
            seen_by(32, 50), path=str(with_config(qwen, tmp_path / "a", num_target_layers=36))
        ).open()
    with pytest.raises(OpenError, match=r"block of 1 \(wants >= 2\)"):
        DSpark(seen_by(32, 50), path=str(with_config(qwen, tmp_path / "b", block_size=1))).open()
    with pytest.raises(OpenError, match=r"threshold=0\.5 wants a confidence head"):
        DSpark(seen_by(32, 50), path=str(GOLDEN / GEMMA[0]), threshold=0.5).open()
    with pytest.raises(OpenError, match=r"markov_w1\.weight is \(50, 6\), wants \(50, 9\)"):
        DSpark(seen_by(32, 50), path=str(with_config(qwen, tmp_path / "c", markov_rank=9))).open()
    assert read(qwen).config["markov_rank"] == 6
