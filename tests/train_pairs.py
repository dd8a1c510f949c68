"""Train small pairs of target and drafter: `PYTHONPATH=.:tests python tests/train_pairs.py [FAMILY …]`.
A target that lies there is taken as it is.

The language has 64 letters and four modes: the first token of a text says which of four fixed
cycles through the letters it follows. Target and drafter learn it in seconds, from fixed seeds, and a
drafter must use what the target shows it (the mode is visible nowhere near the end of a text). A
convention that is off by one anywhere accepts next to nothing. What is trained lies in
tests/golden/pairs, in half precision; tests only load it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from targets import Cpu, opened

from stages.drafters.assistant import Assistant
from stages.drafters.dflash import DFlash
from stages.drafters.dspark import DSpark
from stages.drafters.eagle3 import Eagle3
from stages.drafters.mtp import MTP
from stages.drafters.neural.block import Block
from stages.drafters.neural.markov import Markov
from stages.drafters.neural.tiny import (
    Shapes,
    assistant_shapes,
    block_layers,
    eagle_shapes,
    mtp_shapes,
    nextn_glm_shapes,
    write,
)
from stages.drafters.nextn import NextN
from stages.models.loading import checkpoint
from stages.models.local import Local
from stages.models.tiny import Tiny

PAIRS = Path(__file__).parent / "golden" / "pairs"
LETTERS, MODES, FIRST = 64, 4, 33
LENGTH, ROWS, RATE = 20, 32, 4e-3
STEPS = {"dflash": 1500, "dspark": 800}
KINDS = {"eagle3", "dflash", "dspark", "mtp", "nextn", "assistant"}


def cycles() -> np.ndarray:
    """(modes, letters): the letter after each letter."""
    random = np.random.default_rng(0)
    made = np.zeros((MODES, LETTERS), np.int64)
    for mode in range(MODES):
        order = random.permutation(LETTERS)
        made[mode, order] = np.roll(order, -1)
    return made


CYCLES = cycles()


def text(mode: int, letter: int, length: int) -> list[int]:
    ids, table = [FIRST + LETTERS + mode], CYCLES
    for _ in range(length - 1):
        ids.append(FIRST + letter)
        letter = int(table[mode, letter])
    return ids


def batch(random: np.random.Generator, length: int = LENGTH) -> mx.array:
    picks = zip(random.integers(MODES, size=ROWS), random.integers(LETTERS, size=ROWS), strict=True)
    return mx.array([text(int(mode), int(letter), length) for mode, letter in picks])


def train(loss: Any, parameters: Any, steps: int, rate: Any = RATE) -> Any:
    """Adam on a tree of arrays; `loss(parameters, ids)`; `rate` a number or a schedule."""
    random = np.random.default_rng(1)
    optimizer = optim.Adam(learning_rate=rate)
    step = mx.value_and_grad(loss)
    for index in range(steps):
        value, gradient = step(parameters, batch(random))
        parameters = optimizer.apply_gradients(gradient, parameters)
        mx.eval(parameters, optimizer.state)
        if index % 100 == 99:
            print(f"  {index + 1}: {value.item():.3f}", flush=True)
    return parameters


def cross_entropy(scores: mx.array, ids: mx.array) -> mx.array:
    return nn.losses.cross_entropy(scores.astype(mx.float32), ids).mean()


# --- targets


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


def target(family: str, **changes: Any) -> Local:
    """A trained target of a family, opened."""
    home = PAIRS / f"target_{family}"
    config = Tiny(Cpu(), family=family).configuration()
    shutil.rmtree(home, ignore_errors=True)
    checkpoint.write(home, config["model_type"], {**config, **SMALL, **changes}, 0)
    made = opened(Local(Cpu(), path=str(home)))
    model = made._split.model
    print(family, sum(a.size for _, a in tree_flatten(model.parameters())), "numbers")

    def loss(parameters: Any, ids: mx.array) -> mx.array:
        model.update(parameters)
        return cross_entropy(model(ids[:, :-1]), ids[:, 1:])

    model.update(train(loss, model.trainable_parameters(), 300))
    mx.eval(model.parameters())
    halved(home, dict(tree_flatten(model.parameters())))
    return opened(Local(Cpu(), path=str(home)))


def halved(folder: Path, tensors: dict[str, mx.array]) -> None:
    """Saved in half precision."""
    small = {k: v.astype(mx.float16) if v.dtype == mx.float32 else v for k, v in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), small)


# --- drafters


class Plain:
    """Stands where a cache is while training: causal, nothing kept."""

    offset = 0

    def make_mask(self, width: int, return_array: bool = False) -> Any:
        causal = mx.arange(width)[:, None] >= mx.arange(width)
        return causal if return_array else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class Kept(Plain):
    """Keeps what it was given first, as a block's context; more is joined to it and forgotten."""

    def __init__(self) -> None:
        self.held: Any = None

    @property
    def offset(self) -> int:  # type: ignore[override]
        return 0 if self.held is None else self.held[0].shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.held is None:
            self.held = keys, values
            return keys, values
        return tuple(mx.concatenate(p, 2) for p in zip(self.held, (keys, values), strict=True))


def chain(drafter: Any, target: Any, settle: Any, parameters: Any, steps: int) -> Any:
    """Train a chain drafter: one pass on what the target shows, two more on its own states."""

    def loss(now: Any, ids: mx.array) -> mx.array:
        settle(now)
        model = drafter.model
        _, seen = target.tapped(ids, None, drafter.taps)
        state, total = model.enter(mx.stop_gradient(seen)[:, :-3]), 0.0
        for ahead in range(2):
            tokens = ids[:, 1 + ahead : ids.shape[1] - 2 + ahead]
            state = model.forward(tokens, state, [Plain()])
            wanted = ids[:, 2 + ahead : ids.shape[1] - 1 + ahead]
            total = total + cross_entropy(model.scores(state)[:, 2:], wanted[:, 2:])
        return total

    return train(loss, parameters, steps)


def finish(folder: Path, config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    halved(folder, tensors)


def started(name: str, config: dict[str, Any], shapes: Shapes) -> Path:
    folder = PAIRS / name
    shutil.rmtree(folder, ignore_errors=True)
    return write(folder, config, shapes)


def eagle3(model: Any) -> None:
    config = {
        **model.model_config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 128,
    }
    shapes = eagle_shapes(32, 64, 16, 2, 1, 128)
    folder = started("eagle3", config, shapes)
    drafter = opened(Eagle3(model, path=str(folder)))
    head = drafter.model
    head.tensors["d2t"] = mx.zeros(128, mx.int32)
    fixed = {"d2t": head.tensors.pop("d2t")}

    def settle(now: Any) -> None:
        head.tensors = {**now, **fixed}
        head.block = Block(now, "midlayer.", head.block.shape)

    trained = chain(drafter, model, settle, dict(head.tensors), 300)
    finish(folder, config, {**trained, "d2t": mx.zeros(128, mx.int64)})


def next_layer(name: str, drafter_class: Any, model: Any, config: Any, shapes: Shapes) -> None:
    folder = started(name, config, shapes)
    raw = dict(mx.load(str(folder / "model.safetensors")))
    drafter = opened(drafter_class(model, path=str(folder)))
    head, prefix = drafter.model, drafter.model._names.layer
    parameters = {"around": {k: v for k, v in head.tensors.items() if not _inner(k, head)},
                  "layer": head._layer.trainable_parameters()}  # fmt: skip

    def settle(now: Any) -> None:
        head.tensors = now["around"]
        head._layer.update(now["layer"])

    trained = chain(drafter, model, settle, parameters, 300)
    flat = {prefix + k: v for k, v in tree_flatten(trained["layer"])} | trained["around"]
    finish(folder, config, as_published(flat, raw, prefix))


def _inner(name: str, head: Any) -> bool:
    own = {k for k, _ in tree_flatten(head._layer.parameters())}
    return name.removeprefix(head._names.layer) in own


def as_published(flat: dict[str, Any], raw: dict[str, Any], prefix: str) -> dict[str, mx.array]:
    """Trained tensors under the names of the file they came from, experts apart again."""
    named = {_short(name): name for name in raw}
    made = {}
    for name, array in flat.items():
        short = _short(name)
        if "switch_mlp" in short:
            for e in range(array.shape[0]):
                made[named[short.replace("switch_mlp", f"experts.{e}")]] = array[e]
        else:
            made[named.get(short, name)] = array
    return made


def _short(name: str) -> str:
    """Without the layer it is of."""
    return re.sub(r"^.*layers\.\d+\.", "", name)


def blocks(name: str, drafter_class: Any, model: Any, config: Any, shapes: Shapes) -> None:
    """Train a block drafter: a context of random length, then one block after it."""
    folder = started(name, config, shapes)
    drafter = opened(drafter_class(model, path=str(folder)))
    head, plan, random = drafter.model, drafter.model.plan, np.random.default_rng(2)

    def loss(now: Any, ids: mx.array) -> mx.array:
        head.tensors = now
        head.blocks = [Block(now, f"layers.{i}.", head.blocks[0].shape) for i in range(plan.layers)]
        head.markov = Markov.of(now)
        held = int(random.integers(2, LENGTH - plan.block))
        _, seen = model.tapped(ids, None, drafter.taps)
        caches = [Kept() for _ in range(plan.layers)]
        head.remember(mx.stop_gradient(seen)[:, :held], caches)
        masks = mx.full((ids.shape[0], plan.block - 1), plan.mask_id)
        tokens = mx.concatenate([ids[:, held : held + 1], masks], 1)
        states = head.run(tokens, caches, [held] * ids.shape[0])
        if not plan.shifted:
            wanted = ids[:, held + 1 : held + plan.block]
            return cross_entropy(head.scores(states[:, 1:]), wanted)
        wanted = ids[:, held + 1 : held + 1 + plan.block]
        states = states[:, : wanted.shape[1]]
        scores = head.scores(states)
        previous = ids[:, held : held + wanted.shape[1]]
        bias = [head.markov.bias(previous[:, i], states[:, i], None)[0]
                for i in range(wanted.shape[1])]  # fmt: skip
        return cross_entropy(scores + mx.stack(bias, 1), wanted)

    rate = optim.cosine_decay(RATE, STEPS[name], RATE / 20)
    finish(folder, config, train(loss, dict(head.tensors), STEPS[name], rate))


def assistant(model: Any) -> None:
    """Train on the target's own keys up to a random length; two steps on its own states."""
    from mlx_lm.models.cache import make_prompt_cache

    config, shapes = assistant_shapes((16, 32), heads=2, backbone=32)
    folder = started("assistant", config, shapes)
    drafter = opened(Assistant(model, path=str(folder)))
    head, random = drafter.model, np.random.default_rng(2)

    def loss(now: Any, ids: mx.array) -> mx.array:
        head.tensors = now
        head.blocks = [Block(now, f"model.layers.{i}.", b.shape) for i, b in enumerate(head.blocks)]
        caches, held = make_prompt_cache(model._split.model), int(random.integers(3, LENGTH - 3))
        hidden = mx.stop_gradient(model.hidden(ids[:, :held], caches))
        donated = {}
        for kind, layer in drafter.donors.items():
            keys, values = (mx.stop_gradient(a) for a in caches[layer].state[:2])
            donated[kind] = keys, values, mx.ones((1, 1, 1, keys.shape[2]), mx.bool_)
        state, total = hidden[:, -1:], 0.0
        for ahead in range(3):
            tokens = ids[:, held + ahead : held + ahead + 1]
            normed = head.step(model.embed(tokens), state, donated, held)
            wanted = ids[:, held + ahead + 1 : held + ahead + 2]
            total, state = total + cross_entropy(head.scores(normed), wanted), head.back(normed)
        return total

    finish(folder, config, train(loss, dict(head.tensors), 500))


def known(family: str, **changes: Any) -> Local:
    """The family's target as it lies there; trained if it does not."""
    home = PAIRS / f"target_{family}"
    return opened(Local(Cpu(), path=str(home))) if home.is_dir() else target(family, **changes)


def qwen3_drafters(wanted: set[str]) -> None:
    """Those that share one target."""
    model, shapes = known("qwen3"), block_layers(32, 64, 16, 2, 1, layers=1)
    block = {"num_hidden_layers": 1, "target_layer_ids": [0, 1, 3], "mask_token_id": 5,
             "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 279}  # fmt: skip
    if "eagle3" in wanted:
        eagle3(model)
    if "dflash" in wanted:
        blocks("dflash", DFlash, model, {**block, "block_size": 4}, shapes)
    if "dspark" in wanted:
        linked = {f"markov_head.markov_w{i}.weight": (279, 8) for i in (1, 2)}
        settings = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "block_size": 5}
        blocks("dspark", DSpark, model, {**block, **settings}, shapes | linked)


def main(wanted: set[str]) -> None:
    PAIRS.mkdir(parents=True, exist_ok=True)
    if wanted & {"eagle3", "dflash", "dspark"}:
        qwen3_drafters(wanted)
    if "mtp" in wanted:
        model = known("qwen3_5")
        next_layer("mtp", MTP, model, {"model_type": "qwen3_5_mtp"}, mtp_shapes(model.model_config))
    if "nextn" in wanted:
        model = known("glm4_moe")
        next_layer("nextn", NextN, model, model.model_config, nextn_glm_shapes(model.model_config))
    if "assistant" in wanted:
        assistant(known("gemma4", global_head_dim=32, hidden_size_per_layer_input=0))


if __name__ == "__main__":
    main(set(sys.argv[1:]) or KINDS)
