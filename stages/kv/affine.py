"""Keys and values as 8- or 4-bit affine codes: about a quarter or a seventh of float32's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.types import Target
from stages.kv.coded import Coded, Pair, all_coded, checked
from stages.kv.scheme import Scheme


class Affine(Coded):
    """Codes every full and sliding attention layer alike.

    `group_size` numbers of a head share a scale and a bias; it must divide the model's head sizes.
    """

    def __init__(self, *, bits: int = 8, group_size: int = 64, start: int = 0):
        super().__init__(start)
        self.scheme = checked(Scheme("bits", bits, group_size))
        self.identity: Mapping[str, Any] = {
            "kv": "affine",
            "bits": bits,
            "group_size": group_size,
            "start": start,
        }

    def pairs(self, target: Target) -> Mapping[int, Pair]:
        return all_coded(target, self.scheme, self.scheme)
