"""DFlash block-diffusion drafters in z-lab's convention (arXiv 2602.06036): row j of the block is for
the token at its own position, embedding and head are the target's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import EMBEDDING, DraftRows, Target
from stages.drafters.neural.blockwise import BlockModel, BlockPlan, BlockRows
from stages.drafters.neural.checkpoint import Checkpoint, read
from stages.drafters.neural.drafter import NeuralDrafter

GEMMA_MASK = 4


class DFlash(NeuralDrafter[BlockModel]):
    """`path`: the drafter's folder."""

    family = "dflash"

    def __init__(self, target: Target, *, path: str):
        super().__init__(target, path)

    def load(self) -> tuple[BlockModel, str]:
        found = flat(read(self.folder))
        kinds = " ".join(found.config.get("architectures") or [])
        if "DSpark" in kinds or "markov_head.markov_w1.weight" in found:
            raise OpenError(f"{self.path} follows DeepSpec's convention: take drafter=dspark.")
        plan = block_plan(found, tap_ids(found, self._target.layer_count), shifted=False)
        return BlockModel(found, plan, self._target), found.identity()

    def rows_of(self, model: BlockModel, max_width: int) -> DraftRows:
        return BlockRows(model, self.namespace, max_width)


def flat(found: Checkpoint) -> Checkpoint:
    """Settings nested under `dflash_config` at the top, where those already there win."""
    nested = found.config.get("dflash_config") or {}
    said = {key: value for key, value in found.config.items() if value is not None}
    return Checkpoint(found.folder, {**nested, **said}, found.tensors)


def tap_ids(found: Checkpoint, layers: int) -> tuple[int, ...]:
    """Outputs of the layers that the file names (-1: the embedding), else spread evenly."""
    if (ids := found.value("target_layer_ids")) is not None:
        return tuple(EMBEDDING if i == -1 else int(i) for i in ids)
    count = found.number("num_hidden_layers")
    if count == 1:
        return (layers // 2,)
    return tuple(1 + round(i * (layers - 4) / (count - 1)) for i in range(count))


def block_plan(found: Checkpoint, taps: tuple[int, ...], shifted: bool) -> BlockPlan:
    """Of the drafter's own settings those that matter; much in such files is the target's."""
    count = found.number("num_hidden_layers")
    default = GEMMA_MASK if "gemma" in str(found.value("model_type")).lower() else None
    mask = found.value("mask_token_id", default=default)
    if mask is None:
        raise OpenError(f"{found.folder / 'config.json'} names no mask_token_id.")
    kinds = found.value("layer_types") or ["full_attention"] * count
    views = tuple(_view(found.config, str(kind)) for kind in kinds[:count])
    return BlockPlan(taps, found.number("block_size"), int(mask), shifted, count, views)


def _view(config: Mapping[str, Any], kind: str) -> tuple[bool, int]:
    """(causal within the block?, window). What the file says of causality goes before what engines
    do by layer type: sliding layers look back only."""
    sliding = kind == "sliding_attention"
    window = int(config.get("sliding_window") or config.get("swa_window_size") or 0)
    said = config.get("is_causal", config.get("causal"))
    return (sliding if said is None else bool(said)), window if sliding else 0
