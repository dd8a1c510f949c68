"""Write a small random checkpoint in the real Hugging Face layout."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.text.pieces import byte_letters

VERSION = 1  # of what is written for given settings
MERGES = (
    "t h", "h e", "i n", "e r", "a n", "o n", "r e", "Ġ t", "Ġ a", "Ġ s", "o u", "th e", "in g",
    "an d", "Ġt he", "Ċ Ċ", "Ġ Ġ", "l l", "e n", "a t",
)  # fmt: skip
BOS, EOS, START = "<|bos|>", "<|im_end|>", "<|im_start|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
    folder: Path, module: str, config: Mapping[str, Any], seed: int, nested: str = ""
) -> None:
    """Write to a folder beside it and rename, so that two processes may do it at once. `nested`: where
    the family reads the text model's configuration, if not at the top."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        vocab = _write_tokenizer(partial)
        full = dict(config) | {
            "vocab_size": len(vocab),
            "bos_token_id": vocab[BOS],
            "eos_token_id": vocab[EOS],
        }
        if nested:
            full[nested] = dict(full)
        _write_json(partial / "config.json", full)
        _write_json(partial / "generation_config.json", {"eos_token_id": vocab[EOS]})
        mx.save_safetensors(str(partial / "model.safetensors"), _weights(module, full, seed))
        if not folder.exists():
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Byte-level BPE: ids 0..255 are the bytes, then twenty merges, then three special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(byte_letters().items(), key=lambda item: item[1])
    vocab = dict(letters)
    pairs = [(left, right) for left, right in map(str.split, MERGES)]
    vocab |= {left + right: 256 + index for index, (left, right) in enumerate(pairs)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, START)]
    )
    bos = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "chat_template": TEMPLATE}
    _write_json(
        folder / "tokenizer_config.json", config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    return dict(backend.get_vocab())


def _weights(module: str, config: Mapping[str, Any], seed: int) -> dict[str, mx.array]:
    """Random weights in the shapes that mlx-lm's model has.

    Gains are above the usual ones, so that attention is sharp and the layers outweigh the
    embedding: greedy text then depends on the whole context instead of repeating itself. The
    head's rows of special tokens are zero, so a greedy answer never ends by itself; those of
    bytes that are no printable letter are small, so that text is mostly, not only, readable.
    """
    from mlx.utils import tree_flatten

    family = import_module(f"mlx_lm.models.{module}")
    model = family.Model(family.ModelArgs.from_dict(dict(config)))
    random = np.random.default_rng(seed)
    weights = {}
    for name, array in sorted(tree_flatten(model.parameters())):
        weights[name] = mx.array(_random(random, name, array))
    name = next((name for name in weights if name.endswith("lm_head.weight")), None)
    if name is None:  # tied to the embedding: special tokens may come, and repetition is likelier
        return weights
    head = np.array(weights[name])
    head[:32] *= 0.5
    head[127:256] *= 0.5
    head[256 + len(MERGES) :] = 0
    return weights | {name: mx.array(head)}


def _random(random: np.random.Generator, name: str, array: mx.array) -> np.ndarray:
    if name.endswith("A_log"):  # decays of 0.5 to 0.99 a token: a state that remembers
        return np.log(random.uniform(0.01, 0.7, array.shape)).astype(np.float32)
    if array.ndim < 2:  # norms, biases: near where the family starts them
        return np.array(array, np.float32) + 0.1 * random.standard_normal(array.shape, np.float32)
    if "embed" in name:
        return random.standard_normal(array.shape, np.float32) * array.shape[-1] ** -0.5
    if "conv" in name:  # (channels, taps, 1)
        return random.standard_normal(array.shape, np.float32) * array.shape[1] ** -0.5
    gain = 3.0 if "q_proj" in name or "k_proj" in name else 2.0
    return random.standard_normal(array.shape, np.float32) * (gain * array.shape[-1] ** -0.5)
