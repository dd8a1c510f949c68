"""MTP heads and nextn layers against reference numbers, or a forward written out in numpy."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from by_numpy import attend, rms, swiglu, turned
from neural import GOLDEN, close, golden, seen_by
from support import prompt_ids, serving
from targets import Cpu, opened

from pipeline.errors import OpenError
from stages.drafters.mtp import MTP
from stages.drafters.neural.tiny import latent_attention, mtp_shapes, nextn_shapes, write
from stages.drafters.nextn import NextN
from stages.models.tiny import Tiny

VOCAB, IDS = 279, [3, 41, 270, 8, 8, 17]


def looked_at(config, table, head=None, **more):
    """A target of which only numbers, embedding and head are there."""
    target = seen_by(config["hidden_size"], len(table), config["num_hidden_layers"], **more)
    target.model_config, target.artifact = config, "a"
    target.embed = lambda ids: mx.array(table)[ids]
    target.head = lambda h: h @ mx.array(table if head is None else head).T
    return target


def states(drafter, ids, hidden):
    """The head's outputs over these pairs, in one row."""
    drafter.open()
    rows = drafter.rows(drafter._target, 4)
    rows.prepare_append([[0]], [None]).commit()
    return rows.run([list(ids)], [[mx.array(hidden)]])[0]


def test_a_glm_layer_gives_the_references_numbers():
    want, folder = golden("nextn_glm4_moe"), GOLDEN / "nextn_glm4_moe"
    config = json.loads((folder / "config.json").read_text())
    weights = mx.load(str(folder / "model.safetensors"))
    table = np.array(weights["model.embed_tokens.weight"])
    target = looked_at(config, table, np.array(weights["lm_head.weight"]))
    drafter = NextN(target, path=str(folder))
    out = states(drafter, want["in.tokens"].reshape(-1).tolist(), want["in.hidden"])
    assert close(out, want["out.hidden_post_norm"])
    assert close(drafter.model.scores(out[None])[0], want["out.logits"])
    assert drafter.weight_bytes < sum(w.nbytes for w in weights.values()) - table.nbytes


def qwen_by_numpy(w, config, table, ids, hidden):
    """From the description: zero-centred norms, gated attention, partial rotary embedding."""
    eps, heads, size = config["rms_norm_eps"], 4, config["head_dim"]

    def norm(x, name):
        return rms(x, 1 + w[f"{name}.weight"], eps)

    both = [norm(table[ids], "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
    x = np.concatenate(both, -1) @ w["fc.weight"].T
    a = norm(x, "layers.0.input_layernorm")
    attention = "layers.0.self_attn."
    both_q = (a @ w[f"{attention}q_proj.weight"].T).reshape(len(a), heads, 2 * size)
    q, gate = both_q[..., :size], both_q[..., size:].reshape(len(a), -1)
    k = (a @ w[f"{attention}k_proj.weight"].T).reshape(len(a), 2, size)
    v = (a @ w[f"{attention}v_proj.weight"].T).reshape(len(a), 2, size)
    q = turned(norm(q, f"{attention}q_norm"), size // 2, 10000.0, pairs=False)
    k = turned(norm(k, f"{attention}k_norm"), size // 2, 10000.0, pairs=False)
    out = attend(q, np.repeat(k, 2, 1), np.repeat(v, 2, 1), size**-0.5)
    y = x + (out / (1 + np.exp(-gate))) @ w[f"{attention}o_proj.weight"].T
    y = y + swiglu(norm(y, "layers.0.post_attention_layernorm"), w, "layers.0.mlp")
    return norm(y, "norm")


@pytest.fixture
def qwen(tmp_path):
    """A head with zero-centred norms, with and without its prefix, and numpy's answer."""
    config = Tiny(Cpu(), family="qwen3_5").configuration()
    rope = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = {**config, "vocab_size": VOCAB, "rope_parameters": rope}
    home = write(tmp_path / "raw", config, mtp_shapes(config, "mtp."))
    raw = dict(mx.load(str(home / "model.safetensors")))
    raw = {k: v - 1 if "norm" in k else v for k, v in raw.items()}
    mx.save_safetensors(str(home / "model.safetensors"), raw)
    converted = {k.removeprefix("mtp."): v + 1 if "norm" in k else v for k, v in raw.items()}
    (tmp_path / "own").mkdir()
    shutil.copy(home / "config.json", tmp_path / "own")
    mx.save_safetensors(str(tmp_path / "own" / "model.safetensors"), converted)
    random = np.random.default_rng(1)
    table = random.standard_normal((VOCAB, 64), np.float32)
    hidden = random.standard_normal((6, 64), np.float32)
    weights = {k.removeprefix("mtp."): np.array(v) for k, v in raw.items()}
    answer = qwen_by_numpy(weights, config, table, IDS, hidden)
    return looked_at(config, table, home=home), tmp_path / "own", hidden, answer


def test_an_mtp_head_is_what_its_description_says(qwen):
    """One is added to the norms of the target's own file, and not to a converted one."""
    target, own, hidden, answer = qwen
    inside, apart = MTP(target), MTP(target, path=str(own))
    assert close(states(inside, IDS, hidden), answer)
    assert close(states(apart, IDS, hidden), answer)
    assert inside.namespace != apart.namespace
    assert not close(states(MTP(target, norm_offset=0), IDS, hidden), answer)


def test_experts_of_an_mtp_head_may_be_fused_or_single():
    from stages.drafters.neural.next_layer import stacked_experts

    experts = {f"m.experts.{e}.{n}_proj.weight": mx.full((3, 2), e * 10 + i)
               for e in range(2) for i, n in enumerate(("gate", "up", "down"))}  # fmt: skip
    single = stacked_experts(experts | {"m.gate.weight": mx.zeros(1)}, "m.")
    fused = stacked_experts(
        {"m.experts.gate_up_proj": mx.concatenate(
            [single["m.switch_mlp.gate_proj.weight"], single["m.switch_mlp.up_proj.weight"]], 1),
         "m.experts.down_proj": single["m.switch_mlp.down_proj.weight"]}, "m.",
    )  # fmt: skip
    assert single["m.switch_mlp.up_proj.weight"][1].tolist() == [[11, 11]] * 3
    assert set(single) == {*fused, "m.gate.weight"}
    assert all(mx.array_equal(fused[k], single[k]) for k in fused)


def deepseek_by_numpy(w, config, table, ids, hidden):
    """Latent attention with explicit keys and values, and experts one by one."""
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]
    plain, rotary, value = 16, 8, 16

    def norm(x, name, small=eps):
        return rms(x, w[f"{name}.weight"], small)

    x = np.concatenate([norm(table[ids], "enorm"), norm(hidden, "hnorm")], -1)
    x = x @ w["eh_proj.weight"].T
    a = norm(x, "input_layernorm")
    q = norm(a @ w["self_attn.q_a_proj.weight"].T, "self_attn.q_a_layernorm", 1e-6)
    q = (q @ w["self_attn.q_b_proj.weight"].T).reshape(len(a), heads, plain + rotary)
    latent = a @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    k_turned = turned(latent[:, None, -rotary:], rotary, config["rope_theta"], pairs=True)
    latent = norm(latent[:, :-rotary], "self_attn.kv_a_layernorm", 1e-6)
    kv = (latent @ w["self_attn.kv_b_proj.weight"].T).reshape(len(a), heads, plain + value)
    k = np.concatenate([kv[..., :plain], np.repeat(k_turned, heads, 1)], -1)
    q_turned = turned(q[..., plain:], rotary, config["rope_theta"], pairs=True)
    q = np.concatenate([q[..., :plain], q_turned], -1)
    out = attend(q, k, kv[..., plain:], (plain + rotary) ** -0.5)
    y = x + out @ w["self_attn.o_proj.weight"].T
    return norm(y + experts(norm(y, "post_attention_layernorm"), w), "shared_head.norm")


def experts(z, w):
    """The two best of four by score plus bias, weighted by their scores, and the shared one."""
    scores = 1 / (1 + np.exp(-(z @ w["mlp.gate.weight"].T)))
    best = np.argsort(-(scores + w["mlp.gate.e_score_correction_bias"]), -1)[:, :2]
    total = swiglu(z, w, "mlp.shared_experts")
    for row, chosen in enumerate(best):
        mass = scores[row, chosen].sum()
        for expert in chosen:
            part = swiglu(z[row : row + 1], w, f"mlp.experts.{expert}")[0]
            total[row] += scores[row, expert] / mass * part
    return total


def test_a_deepseek_layer_is_what_its_description_says(tmp_path):
    config = Tiny(Cpu(), family="deepseek_v3").configuration()
    prefix = "model.layers.4."
    folder = write(tmp_path, config, nextn_shapes(config, prefix, latent_attention(config)))
    raw = mx.load(str(folder / "model.safetensors"))
    weights = {k.removeprefix(prefix): np.array(v) for k, v in raw.items()}
    random = np.random.default_rng(2)
    table = random.standard_normal((VOCAB, 64), np.float32)
    hidden = random.standard_normal((6, 64), np.float32)
    target = looked_at(config, table)
    answer = deepseek_by_numpy(weights, config, table, IDS, hidden)
    normed = NextN(target, path=str(folder))
    assert close(states(normed, IDS, hidden), answer)
    raw_chain = NextN(target, path=str(folder), chain="raw")
    unnormed = states(raw_chain, IDS, hidden)
    scores = raw_chain.model.scores(unnormed[None])[0]
    assert not close(unnormed, answer)
    assert close(scores, answer @ table.T, 1e-3)


def test_a_head_inside_the_targets_checkpoint_is_found(tmp_path):
    """mlx-lm drops `mtp.*` when it loads the model; the drafter reads it from the same folder."""
    source = Tiny(Cpu(), family="qwen3_5", cache_dir=str(tmp_path / "cache"))
    home = tmp_path / "model"
    shutil.copytree(source.locate(), home)
    head = write(tmp_path / "head", {}, mtp_shapes(source.configuration(), "mtp."))
    shutil.copy(head / "model.safetensors", home / "model-mtp.safetensors")
    with serving("model=local", f"model.path={home}", "flow=speculative", "depth.max=2",
                 "drafter=mtp", recipe="local") as engine:  # fmt: skip
        answer = engine.generate(prompt_ids(9), max_tokens=8, ignore_eos=True)
        assert engine.pipeline.parts["drafter"].namespace.startswith("mtp:")
        assert engine.stats()["drafter"]["weight_bytes"] > 0
    assert answer["speculation"]["drafted"] > 0


def test_a_target_without_a_head_says_where_to_get_one(tmp_path):
    target = opened(Tiny(Cpu(), family="qwen3_5", cache_dir=str(tmp_path)))
    with pytest.raises(OpenError, match=r"under 'mtp\.'[\s\S]*set drafter\.path"):
        MTP(target).open()
