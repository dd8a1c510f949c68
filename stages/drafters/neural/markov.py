"""DSpark's sequential head: a low-rank bias that links a block's tokens, and a confidence head.

r is the rank. Three kinds: `vanilla` (the previous token alone), `gated` (its share decided by the
state), `rnn` (a state of its own along the block). Which it is shows in the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from stages.drafters.neural.checkpoint import Checkpoint

HEAD = "markov_head."
CONFIDENCE = "confidence_head.proj."


def markov_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The head's tensors, as far as the configuration or the file asks for them."""
    rank = int(checkpoint.value("markov_rank", default=0))
    hidden, vocab = checkpoint.shape("fc.weight")[0], checkpoint.number("vocab_size")
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes |= {f"{HEAD}markov_w{i}.weight": (vocab, rank) for i in (1, 2)}
        kind = checkpoint.value("markov_head_type", default="vanilla")
        if kind == "gated":
            shapes |= _linear(f"{HEAD}gate_proj", rank, hidden + rank)
        if kind == "rnn":
            shapes |= _linear(f"{HEAD}joint_proj", 3 * rank, 2 * rank + hidden)
    if checkpoint.value("enable_confidence_head"):
        linked = rank if checkpoint.value("confidence_head_with_markov") else 0
        shapes |= _linear(CONFIDENCE.removesuffix("."), 1, hidden + linked)
    return shapes


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


class Markov:
    """What is left of the tensors once the backbone is done."""

    def __init__(self, tensors: Mapping[str, mx.array]):
        self.w = tensors
        self.linked = f"{HEAD}markov_w1.weight" in tensors
        self.has_confidence = f"{CONFIDENCE}weight" in tensors

    @classmethod
    def of(cls, tensors: Mapping[str, mx.array]) -> Markov | None:
        made = cls(tensors)
        return made if made.linked or made.has_confidence else None

    def _apply(self, name: str, x: mx.array) -> mx.array:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def bias(
        self, previous_B: mx.array, state_BH: mx.array, memory_Br: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """What is added to the scores (B, V), and the memory for the next token."""
        if not self.linked:
            return mx.zeros((1,)), None
        link = self.w[f"{HEAD}markov_w1.weight"][previous_B]
        if f"{HEAD}gate_proj.weight" in self.w:
            both = mx.concatenate([state_BH, link], -1)
            link = mx.sigmoid(self._apply(f"{HEAD}gate_proj", both)) * link
        elif f"{HEAD}joint_proj.weight" in self.w:
            memory_Br = mx.zeros_like(link) if memory_Br is None else memory_Br
            joint = mx.concatenate([memory_Br, link, state_BH], -1)
            gate, new, out = mx.split(self._apply(f"{HEAD}joint_proj", joint), 3, axis=-1)
            gate = mx.sigmoid(gate)
            memory_Br = gate * memory_Br + (1 - gate) * mx.tanh(new)
            link = mx.tanh(out)
        return link @ self.w[f"{HEAD}markov_w2.weight"].T, memory_Br

    def confidence(self, previous_B: mx.array, state_BH: mx.array) -> mx.array | None:
        """Estimated chance (B,) that the draft of this state is accepted, those before it being so;
        it does not depend on which token is drafted. None without the head."""
        if not self.has_confidence:
            return None
        known = state_BH
        if self.w[f"{CONFIDENCE}weight"].shape[1] > state_BH.shape[1]:
            link = self.w[f"{HEAD}markov_w1.weight"][previous_B]
            known = mx.concatenate([state_BH, link], -1)
        return mx.sigmoid(self._apply(CONFIDENCE.removesuffix("."), known))[:, 0]
