"""Advisory limits, the fifo scheduler and the null parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import RequestError
from pipeline.types import Request
from stages.adapters.none import NoAdapters
from stages.constraints.none import NoConstraint
from stages.limits.advisory import Advisory
from stages.schedulers.fifo import Fifo

TARGET: Any = SimpleNamespace(context_len=100)
KV: Any = None


def advisory(**settings: Any) -> Advisory:
    part: Any = None
    return Advisory(part, part, part, part, part, [], **settings)


def test_a_prompt_must_leave_room_for_one_token():
    limits = advisory()
    limits.admit(99, 1, TARGET, KV, "messages")
    with pytest.raises(
        RequestError, match="prompt has 100 tokens; the context is 100 tokens"
    ) as info:
        limits.admit(100, 1, TARGET, KV, "messages")
    error = info.value
    assert (error.code, error.param, error.status) == ("context_length_exceeded", "messages", 400)


def test_the_operators_context_counts_when_it_is_smaller():
    with pytest.raises(
        RequestError, match="prompt has 50 tokens; the context is 50 tokens"
    ) as info:
        advisory(context=50).admit(50, 1, TARGET, KV, param="prompt")
    assert info.value.param == "prompt"
    advisory(context=500).admit(99, 1, TARGET, KV, "messages")
    with pytest.raises(RequestError, match="the context is 100"):
        advisory(context=500).admit(100, 1, TARGET, KV, "messages")


@pytest.mark.parametrize("max_new", [1, 10**9])
def test_the_answers_length_is_a_ceiling_not_a_reason(max_new):
    advisory(max_tokens=5).admit(10, max_new, TARGET, KV, "messages")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("max_rows", 0, "max_rows: wants >= 1, got 0"),
        ("max_queue", -1, "max_queue: wants >= 0, got -1"),
        ("max_tokens", 0, "max_tokens: wants >= 1, got 0"),
        ("context", 1, "context: wants >= 2, got 1"),
    ],
)
def test_settings_out_of_range_are_named(setting, value, message):
    with pytest.raises(ValueError, match=message):
        advisory(**{setting: value})


def test_fifo_keeps_the_order_of_arrival():
    waiting: list[Any] = [object() for _ in range(5)]
    order = Fifo().order(waiting, waiting[:1])
    assert order == waiting
    assert order is not waiting


def test_null_parts_do_nothing():
    request: Any = object()
    assert NoConstraint().bind(Request("r"), request, []).free
    assert NoAdapters().identity(request) == {}
    for part in (NoConstraint(), NoAdapters(), Fifo(), advisory()):
        part.open()
        part.close()
        part.close()
        assert part.can == frozenset()
