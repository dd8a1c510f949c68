"""Devices: every option says what it is, opens or says what is missing, and bounds MLX's memory."""

from __future__ import annotations

import mlx.core as mx

from pipeline.errors import OpenError

GROUP = "device"


def test_the_constructor_opens_nothing(option):
    part = option()
    assert part.weights in ("float32", "as_is") and isinstance(part.can, frozenset)
    part.close()


def refusal(part) -> str:
    """What it says when it cannot be opened here; empty, and open, if it can."""
    try:
        part.open()
    except OpenError as missing:
        return str(missing)
    return ""


def test_it_opens_or_says_what_is_missing(option):
    part = option()
    if missing := refusal(part):
        assert part.kind in ("metal", "cuda") and f"device {part.kind} is not available" in missing
        return
    said = part.describe()
    assert said["kind"] == part.kind in ("cpu", "metal", "cuda")
    assert said["threads"] is None or said["threads"] >= 1
    part.open()
    assert part.describe().keys() == said.keys()
    part.close()
    part.close()


def test_a_bound_on_memory_is_in_force_until_it_is_lifted(option):
    part = option()
    if refusal(part):
        return  # the test above says what it must say
    before = mx.set_memory_limit(1 << 40)
    mx.set_memory_limit(before)
    bounds = part.limit_memory(3 << 30)
    assert bounds["memory_limit_bytes"] == 3 << 30
    part.limit_memory(None)
    assert mx.set_memory_limit(before) == before
