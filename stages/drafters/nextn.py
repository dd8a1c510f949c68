"""The nextn layer that DeepSeek-V3 and GLM-4.5 to 4.7 checkpoints carry after their last layer.

Its copies of the embedding and the head are left on disk: the target's own are used. mlx-lm's
`sanitize` brings fp8 blocks, experts and latent attention into its layout, as for any other layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import DraftRows, Target
from stages.drafters.neural.chain import ChainRows
from stages.drafters.neural.checkpoint import Checkpoint, dtype_of, fit, read
from stages.drafters.neural.drafter import NeuralDrafter
from stages.drafters.neural.next_layer import Names, NextLayer

LAYER = "model.layers.0."
NAMES = Names(
    join=f"{LAYER}eh_proj.weight",
    embedding_norm=f"{LAYER}enorm.weight",
    hidden_norm=f"{LAYER}hnorm.weight",
    last_norm=f"{LAYER}shared_head.norm.weight",
    layer=LAYER,
)
COPIES = r".*\.(embed_tokens|shared_head\.head)\.weight"
CLASSES = {
    "deepseek_v3": "DeepseekV3DecoderLayer",
    "glm4_moe": "DecoderLayer",
    "glm4_moe_lite": "Glm4MoeLiteDecoderLayer",
}


class NextN(NeuralDrafter[NextLayer]):
    """`chain`: what stands in for the target's state after the first draft, the layer's output
    `normed` or `raw` (engines differ; training used one step only)."""

    family = "nextn"

    def __init__(self, target: Target, *, path: str | None = None, chain: str = "normed"):
        if chain not in ("normed", "raw"):
            raise ValueError(f"chain: wants normed or raw, got {chain}")
        super().__init__(target, path, chain)
        self.chain = chain

    def rows_of(self, model: NextLayer, max_width: int) -> DraftRows:
        return ChainRows(model, self.namespace, max_width)

    def load(self) -> tuple[NextLayer, str]:
        target = self._target
        config = dict(target.model_config)
        prefix = f"model.layers.{config['num_hidden_layers']}."
        found = read(self.folder, prefix)
        width = found.shape(f"{prefix}eh_proj.weight")[1]
        fit(
            found.folder,
            target,
            {"inputs of eh_proj (2 x hidden size)": (width, 2 * target.hidden_size)},
        )
        renamed = {LAYER + k.removeprefix(prefix): v for k, v in found.tensors.items()}
        layer, tensors = _layer(config, renamed)
        mine = Checkpoint(found.folder, config, tensors)
        model = NextLayer(target, layer, mine, NAMES, COPIES, self.chain == "raw", dtype_of(target))
        return model, target.artifact if self.path is None else found.identity()


def _layer(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An empty layer of the target's family, and the tensors as it names them. It is sparse even
    where the first layers are dense."""
    kind = config["model_type"]
    if kind not in CLASSES:
        raise OpenError(f"nextn layers of '{kind}' are not known; known are {sorted(CLASSES)}.")
    module = import_module(f"mlx_lm.models.{kind}")
    rope = config.get("rope_parameters") or {}
    settings = {"rope_scaling": None, **rope, **config}
    settings |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    args = module.ModelArgs.from_dict(settings)
    layer = getattr(module, CLASSES[kind])(args, 0)
    return layer, module.Model.sanitize(SimpleNamespace(args=args), dict(tensors))
