"""Advisory limits, the fifo scheduler and the null parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from targets import Cpu

from pipeline.compose import compose
from pipeline.errors import RequestError
from pipeline.plan import plan
from pipeline.types import LayerSpec, Request
from stages.adapters.none import NoAdapters
from stages.constraints.none import NoConstraint
from stages.kv.native import Native
from stages.kv.paged import Paged
from stages.limits.advisory import Advisory
from stages.limits.estimate import STATES, Estimate
from stages.models.none import NoModel
from stages.models.tiny import Tiny
from stages.schedulers.fifo import Fifo

TARGET: Any = SimpleNamespace(context_len=100)
KV: Any = None
NO_MODEL: Any = SimpleNamespace(weight_bytes=0)


def advisory(**settings: Any) -> Advisory:
    part: Any = SimpleNamespace(max=0)
    return Advisory(part, part, part, part, part, part, [], **settings)


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


def test_the_chunk_that_is_billed_is_the_stages():
    planned = plan(compose("fake", ["limits=budget", "stage.chunked_prefill.chunk=4096"]))
    assert planned.parts["limits"].settings["chunk"] == 4096


def test_fifo_keeps_the_order_of_arrival():
    waiting: list[Any] = [object() for _ in range(5)]
    order = Fifo().order(waiting, waiting[:1])
    assert order == waiting
    assert order is not waiting


def test_null_parts_do_nothing():
    assert NoConstraint().bind(Request("r"), NoModel(), False).free
    assert NoAdapters().resolve(Request("r")) == ()
    for part in (NoConstraint(), NoAdapters(), Fifo(), advisory()):
        part.open()
        part.close()
        part.close()
        assert part.can == frozenset()


def estimate(target: Any, kv: Any, depth: int, drafter: Any = None, chunk: int = 512) -> Any:
    most = SimpleNamespace(max=depth)
    return Estimate(target, kv, most, drafter or SimpleNamespace(), NO_MODEL, NoAdapters(), chunk)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "chunk"),
    [*((name, 300) for name in ("llama", "gemma3", "gpt_oss", "llama4", "qwen3_next", "mamba2")),
     ("gemma3", 1100), ("gpt_oss", 1100)],
)  # fmt: skip
def test_a_row_holds_what_is_billed_and_not_much_less(family, chunk, tmp_path):
    """Windows, states of a fixed size and buffers that grow in steps, under kv=native."""
    target = Tiny(Cpu(), family=family, cache_dir=str(tmp_path))
    target.open()
    bill = estimate(target, Native(), 4, chunk=chunk)
    rows = Native().rows(target, 5)
    rows.prepare_append([None]).commit()
    for start in range(0, max(1800, 2 * chunk), chunk):
        round = rows.begin([[5 + (start + i) % 90 for i in range(chunk)]])
        round.launch(target.hidden(round.tokens_BW, round.caches))
        round.resolve([chunk])
    fixed = bill.row(0)
    assert (fixed > 0) == (family in ("qwen3_next", "mamba2"))
    assert rows.nbytes() - fixed // STATES <= bill.row(rows.lengths[0]) - fixed <= 2 * rows.nbytes()
    target.close()


def test_windows_are_billed_apart_whatever_the_policy_asks_for_them():
    """A policy of other bits in windows than elsewhere: 10 bytes a head there, 3 here."""
    specs = (
        LayerSpec("full", 0, "full:2x4:float32"),
        LayerSpec("sliding", 8, "sliding:1x4:float32"),
    )
    target: Any = SimpleNamespace(specs=specs, weight_bytes=0)

    def token_bytes(target: Any) -> float:
        heads = [int(spec.signature.split(":")[1].split("x")[0]) for spec in target.specs]
        return 10.0 * heads[0] + 3.0 * heads[1]

    kv: Any = SimpleNamespace(bytes_per_token=token_bytes)
    drafter: Any = SimpleNamespace(weight_bytes=7, bytes_per_token=2.0)
    bill = estimate(target, kv, 3, drafter)
    assert bill.row(256) == 256 * (20 + 3 + 2)
    assert bill.row(25600) == 25600 * (20 + 2) + 3 * (8 + 4 + 1024)
    assert bill.of([1], []) == {
        "weights_bytes": 7, "drafter_weights_bytes": 7, "adapters_bytes": 0,
        "rows_bytes": 256 * 25, "parked_bytes": 0,
    }  # fmt: skip
    blocks: Any = SimpleNamespace(bytes_per_token=token_bytes, block_tokens=32)
    paged = estimate(target, blocks, 3, drafter)
    assert paged.rows([1, 33]) == (32 + 64) * 23 + 2 * 2 * 256 * 2  # drafters have buffers


def test_what_paged_keeps_in_buffers_is_billed_as_buffers():
    """As long as the longest row and twice: a latent layer beside a full one, 8 bytes a token each."""
    specs = tuple(LayerSpec(kind, 0, f"{kind}:1x1:float32") for kind in ("full", "latent"))
    target: Any = SimpleNamespace(specs=specs, weight_bytes=0)
    blocks = estimate(target, Paged(block_tokens=32), 0)
    assert blocks.row(1) == 32 * 8 + 256 * 8
    assert blocks.rows([1, 300]) == (32 + 320) * 8 + 2 * 2 * 512 * 8
    plain = estimate(target, Native(), 0)
    assert plain.rows([1, 300]) == 2 * 2 * 512 * 16
