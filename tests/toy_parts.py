"""Parts that only write down what happens to them, and classes to be refused."""

from __future__ import annotations

import os
from typing import Literal

from pipeline.types import Depth, Device, Drafter, KVPolicy, Target, Tier

LOG: list[str] = []
shell = os.system  # what a `_target_` must never reach through an allowed module


class Noted:
    """Opening and closing are written to LOG; either may be told to fail."""

    can = frozenset({"rewind", "batch", "snapshot"})
    prefill, taps, namespace = "tail", (), "noted"

    def __init__(self, *, name: str, fail: Literal["", "open", "close"] = ""):
        self.name, self.fail = name, fail

    def open(self) -> None:
        LOG.append(f"open {self.name}")
        if self.fail == "open":
            raise RuntimeError(f"{self.name} does not open")

    def close(self) -> None:
        LOG.append(f"close {self.name}")
        if self.fail == "close":
            raise RuntimeError(f"{self.name} does not close")


class TwoModels(Noted):
    """Wants both models, the tiers, and parts of its own."""

    def __init__(
        self,
        target: Target,
        draft_model: Target,
        tier: list[Tier],
        first: KVPolicy,
        others: list[Depth],
        *,
        name: str = "two",
    ):
        super().__init__(name=name)
        self.got = (target, draft_model, tier, first, others)


class Rotating(Noted):
    """A KV policy that cannot go back."""

    can = frozenset({"batch", "snapshot"})

    def __init__(self, device: Device, drafter: Drafter | None, *, name: str = "rotating"):
        super().__init__(name=name)
        self.device, self.drafter = device, drafter


class Orphan(Noted):
    """Wants what no group makes."""

    def __init__(self, weather: dict, *, name: str = "orphan"):
        super().__init__(name=name)


class Grumpy(Noted):
    """A constructor that refuses a value."""

    def __init__(self, *, size: int = 1, sizes: tuple[int, ...] = ()):
        if size < 1:
            raise ValueError(f"size: wants 1 or more, got {size}")
        if size > 9:
            raise ValueError("too big altogether")
