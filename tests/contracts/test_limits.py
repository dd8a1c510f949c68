"""Limits: every option says how many at once, and refuses with the numbers what can never fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeline.errors import RequestError
from pipeline.types import LayerSpec, Request, Sequence

GROUP = "limits"
TARGET = SimpleNamespace(context_len=100, specs=(LayerSpec("full"),), weight_bytes=0, name="toy")
KV = SimpleNamespace(bytes_per_token=lambda target: 4.0)
TOYS = {
    "target": TARGET,
    "kv": KV,
    "depth": SimpleNamespace(max=4),
    "drafter": SimpleNamespace(),
    "draft_model": TARGET,
    "adapters": SimpleNamespace(nbytes=0, max_bytes=0),
    "tier": [],
    "device": SimpleNamespace(
        limit_memory=lambda nbytes: {"memory_limit_bytes": nbytes},
        describe=lambda: {"memory_bytes": 64e9},
    ),
}


@pytest.fixture
def limits(option):
    part = option()
    part.open()
    yield part
    part.close()


def test_rows_and_queue_are_counts(limits):
    assert limits.max_rows >= 1
    assert limits.max_queue >= 0
    assert limits.max_tokens is None or limits.max_tokens >= 1
    assert limits.context is None or limits.context >= 2


def test_a_request_that_fits_is_admitted(limits):
    assert limits.admit(10, 20, TARGET, KV, "prompt") is None


def test_a_prompt_over_the_context_is_refused_with_both_numbers(limits):
    with pytest.raises(RequestError, match=r"1000.*100") as refusal:
        limits.admit(1000, 1, TARGET, KV, "prompt")
    assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")


def test_what_is_admitted_may_start_when_nothing_runs_and_is_shown(limits):
    row = Sequence(Request("one"), print, prompt_ids=[1] * 10, max_new=20)
    assert limits.fits(row, [])
    stats = limits.stats([row], [5])
    assert set(stats) == {"estimate", "enforced"}
    assert stats["estimate"]["rows_bytes"] > 0
    assert stats["estimate"]["parked_bytes"] > 0
