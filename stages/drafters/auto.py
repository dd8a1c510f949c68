"""A drafter's folder, whatever family it is of: the configuration and the tensors' names tell."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import OpenError
from pipeline.types import DraftRows, Target
from stages.drafters.assistant import Assistant
from stages.drafters.dflash import DFlash
from stages.drafters.dspark import DSpark
from stages.drafters.eagle3 import Eagle3
from stages.drafters.mtp import MTP
from stages.drafters.neural.checkpoint import Checkpoint, files, read
from stages.drafters.neural.drafter import NeuralDrafter
from stages.drafters.nextn import NextN

FAMILIES: Mapping[str, Any] = {
    "assistant": Assistant,
    "dflash": DFlash,
    "dspark": DSpark,
    "eagle3": Eagle3,
    "mtp": MTP,
    "nextn": NextN,
}


class Auto:
    """`path`: the folder; null looks for a head inside the target's own checkpoint. The family's own
    settings keep their defaults; to turn them choose the family by name."""

    can, needs, prefill = NeuralDrafter.can, NeuralDrafter.needs, NeuralDrafter.prefill

    def __init__(self, target: Target, *, path: str | None = None):
        self._target, self.path = target, path
        self.namespace = f"auto:{path}"
        self.taps: tuple[int, ...] = ()
        self.weight_bytes, self.bytes_per_token = 0, 0.0
        self.notes: list[str] = []
        self._made: Any = None

    def files(self) -> dict[str, Path]:
        return files(self.path)

    def open(self) -> None:
        place = self.path if self.path is not None else self._target.home
        if not isinstance(place, str | Path):
            raise OpenError(f"{self._target.name} has no checkpoint folder; set drafter.path.")
        family, why = recognised(read(place))
        self.notes = [f"drafter.path is a drafter of the family {family}: {why}."]
        logging.getLogger(__name__).info(self.notes[0])
        self._made = FAMILIES[family](self._target, path=self.path)
        self._made.open()
        self.taps, self.namespace = self._made.taps, self._made.namespace
        self.weight_bytes = self._made.weight_bytes
        self.bytes_per_token = self._made.bytes_per_token

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
        self._made = None

    def rows(self, target: Target, max_width: int) -> DraftRows:
        rows: DraftRows = self._made.rows(target, max_width)
        return rows


def recognised(found: Checkpoint) -> tuple[str, str]:
    """(family, what told it). OpenError for what is no drafter, or none that is known here."""
    config, names = found.config, set(found.tensors)
    nested = config.get("dflash_config") or {}
    kinds = " ".join([*config.get("architectures", []), str(config.get("model_type"))])
    kinds += f" {config.get('speculators_model_type')} {nested.get('projector_type')}"
    mine = {name.rsplit("layers.", 1)[0] for name in names if "layers." in name}
    for family, told, why in (
        ("assistant", "_assistant" in kinds, "the model type"),
        ("assistant", {"pre_projection.weight", "post_projection.weight"} <= names, "projections"),
        ("", "DFlash2" in kinds or _any(names, "candidate_selector."), "DFlash2"),
        ("", _any(names, "mtp.0.main_proj"), "DeepSeek-V4's DSpark"),
        ("dspark", "markov_head.markov_w1.weight" in names, "a Markov head"),
        ("dspark", "dspark" in kinds.lower(), "the architecture"),
        ("eagle3", _any(names, "midlayer."), "a layer named midlayer"),
        ("eagle3", "layers.0.hidden_norm.weight" in names, "a layer that takes two inputs"),
        ("dflash", {"fc.weight", "hidden_norm.weight"} <= _bare(names), "fc and hidden_norm"),
        ("mtp", "pre_fc_norm_embedding.weight" in _bare(names), "pre_fc_norm_embedding"),
        ("nextn", any(n.endswith(".eh_proj.weight") for n in names), "eh_proj after the layers"),
    ):
        if told and family:
            return family, f"{why} ({found.seen()})"
        if told:
            raise OpenError(f"{found.folder} is {why}, which is not supported: {found.seen()}")
    raise OpenError(_unknown(found, bool(mine)))


def _any(names: set[str], prefix: str) -> bool:
    return any(name.removeprefix("model.").startswith(prefix) for name in names)


def _bare(names: set[str]) -> set[str]:
    """Names without the prefixes that some packagings put before them."""
    return {name.removeprefix("model.").removeprefix("mtp.") for name in names}


def _unknown(found: Checkpoint, layered: bool) -> str:
    hint = "It may be a whole model: drafter=two_model model@draft_model=local draft_model.path=…"
    known = f"Known are {', '.join(FAMILIES)}."
    return f"{found.folder} is no drafter of a known family: {found.seen()}. " + (
        f"{hint} {known}" if layered else known
    )
