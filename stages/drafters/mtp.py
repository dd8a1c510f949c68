"""The MTP heads of Qwen3-Next, Qwen3.5 and Qwen3.6.

They lie in the target's own checkpoint under `mtp.` (most MLX conversions have lost them), or in a
folder of their own without that prefix. The published tensors hold norms as offsets from one; files
without the prefix were converted and hold the norms themselves. So one is added to what has the
prefix, and only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import DraftRows, Target
from stages.drafters.neural.chain import ChainRows
from stages.drafters.neural.checkpoint import Checkpoint, dtype_of, fit, read
from stages.drafters.neural.drafter import NeuralDrafter
from stages.drafters.neural.next_layer import Names, NextLayer, stacked_experts

NAMES = Names(
    join="fc.weight",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    last_norm="norm.weight",
    layer="layers.0.",
)
LAYER = {"qwen3_next": "Qwen3NextDecoderLayer", "qwen3_5": "DecoderLayer"}


class MTP(NeuralDrafter[NextLayer]):
    """`path`: null for the head inside the target's checkpoint. `norm_offset`: 0 or 1 where a file
    breaks the rule above."""

    family = "mtp"

    def __init__(self, target: Target, *, path: str | None = None, norm_offset: int | None = None):
        if norm_offset not in (None, 0, 1):
            raise ValueError(f"norm_offset: wants 0, 1 or null, got {norm_offset}")
        super().__init__(target, path, norm_offset)
        self.norm_offset = norm_offset

    def rows_of(self, model: NextLayer, max_width: int) -> DraftRows:
        return ChainRows(model, self.namespace, max_width)

    def load(self) -> tuple[NextLayer, str]:
        checkpoint = self._checkpoint()
        offset = self.norm_offset
        raw = any(name.startswith("mtp.") for name in checkpoint.tensors)
        tensors = {k.removeprefix("mtp."): v for k, v in checkpoint.tensors.items()}
        if offset is None:
            offset = int(raw)
        tensors = {k: v + offset if "norm" in k else v for k, v in tensors.items()}
        tensors = stacked_experts(tensors, "layers.0.mlp.")
        mine = Checkpoint(checkpoint.folder, checkpoint.config, tensors)
        theirs = self._target.hidden_size
        width = mine.shape("fc.weight")[1]
        fit(mine.folder, self._target, {"inputs of fc (2 x hidden size)": (width, 2 * theirs)})
        layer = _layer(self._target.model_config, moe="layers.0.mlp.gate.weight" in mine)
        model = NextLayer(self._target, layer, mine, NAMES, dtype=dtype_of(self._target))
        inside = self.path is None
        return model, self._target.artifact if inside else checkpoint.identity()

    def _checkpoint(self) -> Checkpoint:
        if self.path is not None:
            return read(self.path)
        home = self.folder
        try:
            return read(home, "mtp.")
        except OpenError as error:
            raise OpenError(
                f"{error} Conversions often leave the head out: take the original checkpoint's, "
                "and set drafter.path to its folder."
            ) from error


def _layer(config: Mapping[str, Any], moe: bool) -> Any:
    """An empty full-attention layer of the target's family."""
    from importlib import import_module

    text = dict(config.get("text_config") or config)
    kind = "qwen3_next" if text.get("model_type", "").startswith("qwen3_next") else "qwen3_5"
    module = import_module(f"mlx_lm.models.{kind}")
    text |= {"num_experts": text.get("num_experts", 0) if moe else 0}
    text |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    args = (module.ModelArgs if kind == "qwen3_next" else module.TextModelArgs).from_dict(text)
    return getattr(module, LAYER[kind])(args, args.full_attention_interval - 1)
