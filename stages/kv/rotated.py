"""Affine codes of turned keys and values: outliers are spread over a head before they are coded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.types import Target
from stages.kv.coded import Coded, Pair, all_coded, checked
from stages.kv.scheme import Scheme
from stages.rows.turned import SEED


class Rotated(Coded):
    """`kv8` and `kv4` behind a randomized Hadamard transform of every head."""

    def __init__(self, *, k_bits: int = 4, v_bits: int = 4, group_size: int = 64, start: int = 0):
        super().__init__(start)
        self.keys = checked(Scheme("k_bits", k_bits, group_size, rotation="hadamard"))
        self.values = checked(Scheme("v_bits", v_bits, group_size, rotation="hadamard"))
        self.identity: Mapping[str, Any] = {
            "kv": "rotated",
            "k_bits": k_bits,
            "v_bits": v_bits,
            "group_size": group_size,
            "seed": SEED,
            "start": start,
        }

    def pairs(self, target: Target) -> Mapping[int, Pair]:
        return all_coded(target, self.keys, self.values)
