"""A deterministic target without weights, for tests, server work and measuring the engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.errors import below, refuse
from pipeline.identity import digest
from pipeline.types import Device, Dialect, LayerSpec, Sampling
from stages.models.text.chat_template import ChatTemplate, template_source
from stages.models.text.dialect import TemplateDialect
from stages.models.text.pieces import BytesDecoder, join
from stages.models.text.tokens import no_template, well_formed

BOS, EOS, STATES = 256, 257, 258  # ids 0..255 are bytes
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PEAK = 8.0  # how far the next token's score stands above the noise of the others


class Fake:
    """The next token is a pure function of what the row has read.

    With `layers=0` only of its last token: cheapest, and text walks through the printable
    letters. With `layers>0` each layer keeps one number a token, the sum over all tokens weighted
    by their positions: a token lost, doubled, moved or taken from another row changes the answer.
    `eos_every=n` makes EOS the best token of every n-th state. `delay_ms` is slept each forward.
    ValueError names a setting that is out of range.
    """

    can = frozenset({"score"})

    def __init__(
        self,
        device: Device,
        *,
        vocab_size: int = STATES,
        context: int = 8192,
        layers: int = 0,
        seed: int = 0,
        eos_every: int = 0,
        delay_ms: float = 0.0,
        template: str | None = TEMPLATE,
        name: str = "fake",
    ):
        refuse(
            vocab_size=below(vocab_size, STATES),
            context=below(context, 1),
            layers=below(layers, 0),
            seed=below(seed, 0),
            eos_every=below(eos_every, 0),
            delay_ms=below(delay_ms, 0),
        )
        self.device, self.name, self.template = device, name, template
        self.vocab_size, self.context_len, self.layers = vocab_size, context, layers
        self.seed, self.eos_every, self.delay_ms = seed, eos_every, delay_ms
        self.eos_ids = frozenset({EOS})
        self.generation, self.dtype, self.weight_bytes, self.calls = Sampling(), "float32", 0, 0
        self.specs = (LayerSpec("full", 0, "full:1x1:float32"),) * layers
        self.artifact = digest(
            {"fake": 1, "vocab": vocab_size, "layers": layers, "seed": seed, "eos": eos_every}
        )
        self.notes: list[str] = []

    def open(self) -> None:
        self.tokenizer = ByteTokens(template_source(self.template) if self.template else None)
        self._scores: Any = mx.array(_scores(self.vocab_size, self.seed, self.eos_every))
        mx.eval(self._scores)
        self.calls = 0

    def close(self) -> None:
        self._scores = None

    def hidden(self, tokens_BW: Any, caches: Sequence[Any]) -> Any:
        """The state index of each position, (B, W, 1). Few operations: the engine is measured on it."""
        if self.delay_ms:
            time.sleep(self.delay_ms / 1000)
        if not self.layers:
            known = tokens_BW if self.vocab_size == STATES else mx.minimum(tokens_BW, STATES - 1)
            return known[..., None]
        state = tokens_BW.astype(mx.float32) + 1
        for cache in caches:
            state = _layer(state, cache)
        return state.astype(mx.int32)[..., None]

    def head(self, hidden_BWD: Any) -> Any:
        return self._scores[hidden_BWD.squeeze(-1)]

    def prefill_chunk(self, prompt_len: int) -> int | None:
        return None


def _layer(state_BW: Any, cache: Any) -> Any:
    """Append one number a token and sum, over what each position may see, number x place. The sum
    stays below 2**24 for 9,000 tokens, so float32 holds it exactly; then it is taken modulo."""
    width = state_BW.shape[1]
    mask = cache.make_mask(width, return_array=True, window_size=None)
    places = mx.reshape(mx.array(cache.offset), (-1, 1)) + mx.arange(width)[None] + 1
    keys = state_BW[:, None, :, None]
    weighted = (state_BW * (places % 7 + 1))[:, None, :, None]
    _, values = cache.update_and_fetch(keys, weighted)
    seen = values[:, :, None, :, 0]  # (B, 1, 1, T)
    if mask is None:
        mask = mx.ones((1, 1, 1, 1), mx.bool_)
    return (mx.where(mask, seen, 0).sum(-1)[:, 0] + state_BW) % STATES


def _scores(vocab: int, seed: int, eos_every: int) -> np.ndarray:
    """(states, vocabulary) scores. The best next token of a printable letter is the next one of a
    fixed shuffle of all printable letters; other states lead to one of them."""
    random = np.random.default_rng(seed)
    scores = random.random((STATES, vocab), np.float32) * 4
    scores[:, BOS:] -= 40
    letters = random.permutation(np.arange(32, 127))
    after = dict(zip(letters.tolist(), np.roll(letters, -1).tolist(), strict=True))
    best = [after.get(state, 32 + state % 95) for state in range(STATES)]
    scores[np.arange(STATES), best] += PEAK
    if eos_every:
        scores[::eos_every, EOS] = 4 * PEAK
    return scores


class ByteTokens:
    """A `Tokenizer` whose ids are bytes. No BOS is added."""

    def __init__(self, template: str | None):
        self.template, self.special_ids = template, frozenset({BOS, EOS})
        self.identity = digest({"bytes": 1, "template": template})
        self._chat = ChatTemplate(template, {}) if template else None
        self.dialect: Dialect = TemplateDialect(self, self._chat)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(well_formed(text).encode())

    def render(
        self, messages: Sequence[Mapping[str, Any]], args: Mapping[str, Any], *, reply: bool = True
    ) -> list[int]:
        if self._chat is None:
            raise no_template()
        return self.encode(self._chat.render(messages, args, reply, self.dialect.native))

    def decode(self, ids: Iterable[int]) -> str:
        return join(self.decoder(), ids)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < BOS:
            return bytes([token_id])
        return {BOS: b"<bos>", EOS: b"<eos>"}.get(token_id, b"")

    def decoder(self, shown: frozenset[int] = frozenset()) -> BytesDecoder:
        return BytesDecoder(self.token_bytes, self.special_ids - shown)
