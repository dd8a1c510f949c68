"""Rotated vectors as Lloyd-Max codes (TurboQuant, arXiv 2504.19874): few bits without outliers.

Two ways of it, told apart by `keys`. `affine`, with 8 and 3 bits the preset `k8v3`: keys, which bear
little error, as plain affine codes, values rotated with a scale every 32 numbers. `rotated`: the
paper's own codec of least squared error for both, one length a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pipeline.types import Target
from stages.kv.coded import Coded, Pair, all_coded, checked
from stages.kv.scheme import Scheme
from stages.rows.turned import SEED, Kind

GROUP = 32  # numbers that share a scale where keys are affine


class TurboQuant(Coded):
    """Codes every full and sliding attention layer alike. `rotation` qr takes every head size,
    hadamard those of a Hadamard matrix."""

    def __init__(
        self,
        *,
        keys: Literal["affine", "rotated"] = "affine",
        k_bits: int = 8,
        v_bits: int = 3,
        rotation: Kind = "hadamard",
        start: int = 0,
    ):
        super().__init__(start)
        whole = keys == "rotated"
        group, turn = (None, rotation) if whole else (GROUP, None)
        self.keys = checked(Scheme("k_bits", k_bits, group, levels=whole, rotation=turn))
        self.values = checked(Scheme("v_bits", v_bits, group, levels=True, rotation=rotation))
        self.identity: Mapping[str, Any] = {
            "kv": "turboquant",
            "keys": keys,
            "k_bits": k_bits,
            "v_bits": v_bits,
            "rotation": rotation,
            "seed": SEED,
            "start": start,
        }

    def pairs(self, target: Target) -> Mapping[int, Pair]:
        return all_coded(target, self.keys, self.values)
