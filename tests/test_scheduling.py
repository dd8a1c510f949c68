"""Steps shared by prefill and decode, room by bytes, and the same tokens whatever the schedule."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from support import Running, prompt_ids, serving

from pipeline.errors import ConfigError, OpenError, RequestError
from pipeline.types import Done

ROW = 4 * 8 * 256  # bytes of 256 tokens in the fake model's four layers
FAKE = ("model.layers=4", "model.context=4096")


def budgeted(rows: float, *overrides: str, work: str = "0"):
    """The fake model with room for that many rows of 256 tokens; more than one row counts twice."""
    budget = (f"limits.memory_gb={rows * ROW / 1e9}", f"limits.work_gb={work}", "drafter=none")
    return serving(*FAKE, "flow=plain", "limits=budget", *budget, *overrides, recipe="fake")


@pytest.fixture
def widths(monkeypatch):
    """Shapes (rows, width) of all forwards of an engine's model, in order."""

    def watch(engine) -> list[tuple[int, int]]:
        model, seen = engine.pipeline.parts["model"], []
        hidden = type(model).hidden

        def noted(tokens_BW, caches):
            seen.append(tuple(tokens_BW.shape))
            return hidden(model, tokens_BW, caches)

        monkeypatch.setattr(model, "hidden", noted)
        return seen

    return watch


@contextmanager
def held(engine):
    """The owner's thread is busy with something else; what is asked meanwhile starts together."""
    entered, gate = threading.Event(), threading.Event()
    busy = engine.when_idle(lambda: (entered.set(), gate.wait(30)))
    assert entered.wait(10)
    yield
    gate.set()
    busy.result(10)


def arrived(engine, run: Running) -> Running:
    """The run, once it is in the queue: the next one comes after it."""
    while run.ticket.sequence.max_new == 0 or run.events.empty():
        time.sleep(0.001)
    time.sleep(0.005)
    return run


# --- a step's tokens


@pytest.mark.parametrize("scheduler", ["fifo", "fair"])
def test_prompts_shrink_to_what_decoding_leaves_of_a_step(scheduler, widths):
    overrides = (f"scheduler={scheduler}", "scheduler.step_tokens=20", "drafter=none", "flow=plain")
    with serving(*overrides, "model.delay_ms=2", recipe="fake") as engine:
        seen = widths(engine)
        decoding = Running(engine, [70], max_tokens=400)
        next(iter(decoding))
        newcomers = [Running(engine, prompt_ids(61), max_tokens=2) for _ in range(3)]
        for run in newcomers:
            run.result()
        decoding.ticket.cancel()
    prefills = [rows * width for rows, width in seen if width > 1]
    assert sum(prefills) <= 3 * 60
    assert max(prefills) <= 19


def test_between_two_rounds_there_is_one_step_however_many_prompts_wait(widths):
    with serving("model.delay_ms=2", "drafter=none", "flow=plain", recipe="fake") as engine:
        seen = widths(engine)
        decoding = Running(engine, [70], max_tokens=2000)
        next(iter(decoding))
        long = [Running(engine, prompt_ids(600 + n), max_tokens=1) for n in range(3)]
        for run in long:
            run.result()
        decoding.ticket.cancel()
    steps = _steps(seen)
    assert max(steps) == 255
    assert sum(steps) >= 3 * 600


def _steps(seen):
    """Prompt tokens between two rounds."""
    turns = itertools.groupby(seen, lambda one: one[1] > 1)
    return [sum(rows * width for rows, width in passes) for wide, passes in turns if wide]


def test_short_prompts_share_a_step(widths):
    overrides = ("scheduler.step_tokens=100", "limits.max_rows=16", "model.delay_ms=2")
    with serving(*overrides, "drafter=none", "flow=plain", recipe="fake") as engine:
        seen = widths(engine)
        with held(engine):
            decoding = arrived(engine, Running(engine, [70], max_tokens=2000))
            lengths = range(21, 30)
            short = [arrived(engine, Running(engine, prompt_ids(n), max_tokens=1)) for n in lengths]
        for run in short:
            run.result()
        decoding.ticket.cancel()
    assert len(_steps(seen)) <= 4  # of nine prompts
    assert max(_steps(seen)) <= 99


def test_prompts_take_turns(widths):
    with serving(
        "drafter=none", "flow=plain", "stage.chunked_prefill.chunk=10", recipe="fake"
    ) as e:
        seen = widths(e)
        with held(e):
            runs = {n: arrived(e, Running(e, prompt_ids(n), max_tokens=1)) for n in (201, 41)}
            ends = {n: passes_at_end(run, seen) for n, run in runs.items()}
        for run in runs.values():
            run.result()
    assert ends[41][0] <= 12  # it was not behind the long one's twenty chunks
    assert ends[201][0] > 20


def passes_at_end(run: Running, seen: list) -> list[int]:
    """Filled with the number of forwards there had been when the request ended."""
    sequence, ended = run.ticket.sequence, []
    deliver = sequence.deliver

    def noted(event):
        if isinstance(event, Done):
            ended.append(len(seen))
        deliver(event)

    sequence.deliver = noted
    return ended


def test_a_step_without_bound_takes_whole_chunks(widths):
    with serving(
        "scheduler.step_tokens=null", "drafter=none", "flow=plain", recipe="fake"
    ) as engine:
        seen = widths(engine)
        decoding = Running(engine, [70], max_tokens=2000)
        next(iter(decoding))
        Running(engine, prompt_ids(601), max_tokens=1).result()
        decoding.ticket.cancel()
    assert 511 <= max(width for _, width in seen) <= 512


def test_a_longest_gap_of_a_decoding_row_is_below_a_chunk_and_a_half(widths):
    """Counted in tokens computed, which is what takes time: clocks lie on a shared machine."""
    with serving("drafter=none", "flow=plain", "model.delay_ms=1", recipe="fake") as engine:
        seen = widths(engine)
        chunk = engine.pipeline.stages["chunked_prefill"].chunk
        decoding = Running(engine, [70], max_tokens=3000)
        next(iter(decoding))
        Running(engine, prompt_ids(4096), max_tokens=1).result()
        decoding.ticket.cancel()
    gaps = [0]
    for rows, width in seen:
        gaps[-1] += rows * width
        gaps += [0] * (width == 1)  # a round: the row has its next token
    assert sum(gaps) > 4096
    assert max(gaps) <= 1.5 * chunk


def test_the_same_tokens_whatever_the_schedule():
    prompts = [prompt_ids(n, seed=n) for n in (90, 7, 33, 64, 12)]
    wanted: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    with serving("flow=plain", "drafter=none", "tier=none") as engine:
        alone = [engine.generate(p, **wanted)["token_ids"] for p in prompts]
    overrides = ("scheduler=fair", "scheduler.step_tokens=20", "limits=budget", "limits.max_rows=3")
    with serving(*overrides, "flow=speculative", "drafter=ngram", "tier=ram") as engine:
        runs = [
            Running(engine, p, client=f"client {i % 2}", priority=i % 3, **wanted)
            for i, p in enumerate(prompts)
        ]
        assert [run.result()["token_ids"] for run in runs] == alone


def test_the_fair_order_is_the_order_of_service(monkeypatch):
    with serving(
        "scheduler=fair",
        "limits.max_rows=1",
        "tier=none",
        "flow=plain",
        "drafter=none",
        recipe="fake",
    ) as engine:
        served = []
        finished = engine.pipeline.parts["scheduler"].finished
        monkeypatch.setattr(
            engine.pipeline.parts["scheduler"],
            "finished",
            lambda sequence: (served.append(sequence.request.client), finished(sequence)),
        )
        with held(engine):
            runs = [
                arrived(engine, Running(engine, prompt_ids(20), max_tokens=3, client=client))
                for client in "aaaabb"
            ]
        for run in runs:
            run.result()
    assert served == list("ababaa")


# --- cancelling


def test_a_row_cancelled_in_a_shared_prefill_costs_one_more_chunk_at_most(widths):
    with serving(
        "stage.chunked_prefill.chunk=4", "model.delay_ms=5", "drafter=none", "flow=plain",
        recipe="fake",
    ) as engine:  # fmt: skip
        seen = widths(engine)
        with held(engine):
            stays, leaves = (
                arrived(engine, Running(engine, prompt_ids(81, seed=n), max_tokens=3))
                for n in (1, 2)
            )
        while len(seen) < 3:
            time.sleep(0.001)
        leaves.ticket.cancel()
        leaves.ticket.cancel()
        at = len(seen)
        assert list(leaves)[-1].finish_reason == "cancelled"
        assert stays.result()["prompt_tokens"] == 81
    shapes = Counter(rows for rows, width in seen[at + 1 :])
    assert shapes[2] == 0
    assert sum(width for _, width in seen if width > 1) == 80  # no token twice
    assert engine.stats()["rows"]["open_requests"] == 0


def test_who_gives_up_in_the_queue_leaves_at_once():
    with serving("limits.max_rows=1", "model.delay_ms=20", "drafter=none", recipe="fake") as engine:
        runs = Running(engine, [70], max_tokens=500)
        next(iter(runs))
        waits = Running(engine, [71], max_tokens=5)
        waits.ticket.cancel()
        asked = time.perf_counter()
        assert list(waits)[-1].usage.completion_tokens == 0
        assert time.perf_counter() - asked < 0.5
        assert engine.stats()["rows"]["waiting"] == 0
        runs.ticket.cancel()


# --- bytes


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic():
    with budgeted(8) as engine:
        assert engine.target_info["context_len"] == 8 * 256
        answer = engine.generate(prompt_ids(8 * 256 - 5), max_tokens=100)
        assert (
            answer["finish_reason"] == "length"
        )  # a ceiling is clamped, it is no reason to refuse
        assert answer["completion_tokens"] == 5
        with pytest.raises(
            RequestError, match="a row of 2561 tokens 90,112 = 90,112 bytes, "
        ) as no:
            engine.generate(prompt_ids(2560), max_tokens=1)
        assert (no.value.status, no.value.code) == (400, "memory_budget_exceeded")
        assert "budget 65,536" in str(no.value)
        assert engine.generate([70], max_tokens=3)["completion_tokens"] == 3


def test_rows_whose_sum_is_too_big_wait_for_each_other():
    with budgeted(8, "model.delay_ms=2") as engine:
        big = [Running(engine, prompt_ids(600), max_tokens=20) for _ in range(3)]
        small = [Running(engine, prompt_ids(10), max_tokens=5) for _ in range(2)]
        most = 0
        while engine.stats()["rows"]["open_requests"]:
            most = max(most, sum(len(s.prompt_ids) == 600 for s in engine._turns.running))
            estimate = engine.stats()["memory"]["estimate"]
            assert estimate["rows_bytes"] <= estimate["budget_bytes"] == 8 * ROW
            time.sleep(0.002)
        assert most == 1
        assert [len(r.result()["token_ids"]) for r in (*big, *small)] == [20, 20, 20, 5, 5]
        assert engine.stats()["memory"]["estimate"]["rows_bytes"] == 0


def test_small_rows_run_together_within_the_budget():
    with budgeted(8, "model.delay_ms=2") as engine:
        most, runs = 0, [Running(engine, prompt_ids(20), max_tokens=30) for _ in range(6)]
        while engine.stats()["rows"]["open_requests"]:
            most = max(most, engine._turns.rows_in_use)
            time.sleep(0.002)
        assert most == 4  # rows of 256 tokens, twice while one joins
        assert [len(run.result()["token_ids"]) for run in runs] == [30] * 6


def test_saved_states_go_before_a_row_has_to_wait():
    with budgeted(8, "tier=ram") as engine:
        tier = engine.pipeline.parts["tier"][0]
        for seed in range(12):
            engine.generate(prompt_ids(200, seed=seed), max_tokens=4)
            assert engine.stats()["tiers"]["ram"]["bytes"] <= 7 * ROW
        assert engine.stats()["tiers"]["ram"]["bytes"] > 3 * ROW
        engine.generate(prompt_ids(1500, seed=99), max_tokens=400)
        assert engine.stats()["tiers"]["ram"]["bytes"] <= 8 * ROW
        assert engine.stats()["tiers"]["ram"]["evictions"] > 0
        engine.when_idle(tier.check_integrity).result(5)


def test_mlx_is_limited_while_the_engine_is_open_and_not_after():
    before = mx.set_memory_limit(1 << 40)
    try:
        with budgeted(8) as engine:
            memory = engine.stats()["memory"]
            assert memory["enforced"] == {"memory_limit_bytes": 8 * ROW}
            assert memory["estimate"]["budget_bytes"] == 8 * ROW
            assert mx.get_memory_limit() == 8 * ROW
        assert mx.get_memory_limit() == 1 << 40
    finally:
        mx.set_memory_limit(before)


def test_estimates_are_shown_and_not_enforced_by_default():
    with serving(*FAKE, "drafter=none", recipe="fake") as engine:
        engine.generate([70], max_tokens=2)
        assert engine.stats()["memory"]["enforced"] == {}
        assert engine.stats()["memory"]["estimate"]["weights_bytes"] == 0


def test_a_budget_below_one_row_does_not_open():
    with pytest.raises(OpenError, match="row of 2 tokens 8,192 = 8,192 bytes, budget 4,096"):
        budgeted(0.5).__enter__()


@pytest.mark.parametrize(
    "override", ["memory_gb=-1", "memory_gb=0", "memory_gb=.inf", "memory_gb=1e300", "work_gb=9"]
)
def test_sizes_out_of_range_are_refused_by_check(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        budgeted(8, f"limits.{override}").__enter__()


def test_a_budget_takes_what_advisory_limits_take_and_tells_all_that_is_wrong():
    with pytest.raises(ConfigError) as caught:
        budgeted(8, "limits.memory_gb=0", "limits.max_rows=0", "limits.max_queue=-1").__enter__()
    assert {p.where for p in caught.value.problems} == {
        "limits.memory_gb", "limits.work_gb", "limits.max_rows", "limits.max_queue",
    }  # fmt: skip
    with budgeted(8, "limits.max_rows=3") as engine:
        assert engine.pipeline.parts["limits"].max_rows == 3


def test_a_budget_beyond_the_machines_memory_does_not_open():
    with pytest.raises(OpenError, match=r"limits.memory_gb: 1e\+06 is more than .* Try limits.mem"):
        budgeted(8, "limits.memory_gb=1e6").__enter__()


# --- parking


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("scheduler", ["fifo", "fair"])
def test_a_parked_row_goes_on_with_the_same_tokens(family, scheduler):
    wanted = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    prompts = [prompt_ids(n, seed=n) for n in (40, 25, 33)]
    with serving(f"model.family={family}", "flow=plain", "drafter=none", "tier=none") as engine:
        alone = [engine.generate(p, **wanted)["token_ids"] for p in prompts]
    with serving(
        f"model.family={family}", f"scheduler={scheduler}", "limits=budget", "limits.max_rows=2",
        "flow=speculative", "drafter=ngram", "drafter.min_ngram=1", "tier=none",
    ) as engine:  # fmt: skip
        old = [Running(engine, p, priority=n, **wanted) for n, p in enumerate(prompts[:2])]
        heads = [next(iter(run)).token_ids for run in old]
        urgent = Running(engine, prompts[2], priority=2, **wanted)
        assert urgent.result()["token_ids"] == alone[2]
        for head, run, ids in zip(heads, old, alone, strict=False):
            assert [*head, *run.result()["token_ids"]] == ids
        stats = engine.stats()
        assert stats["counts"]["parked"] == 1
        assert stats["memory"]["estimate"]["parked_bytes"] == 0


def test_the_newest_of_the_lowest_priority_is_parked_and_no_more_than_needed():
    with serving(
        "limits=budget", "limits.max_rows=3", "model.delay_ms=3", "drafter=none", "flow=plain",
        recipe="fake",
    ) as engine:  # fmt: skip
        old = []
        for n, priority in enumerate((0, 0, 1)):
            old.append(Running(engine, [70 + n], max_tokens=100, priority=priority))
            next(iter(old[-1]))  # it runs, so it is older than the next one
        urgent = Running(engine, [80], max_tokens=40, priority=1)
        next(iter(urgent))
        parked = [
            run.ticket.sequence for run in old if run.ticket.sequence not in engine._turns.running
        ]
        assert parked == [old[1].ticket.sequence]
        equal = Running(engine, [81], max_tokens=4, priority=0)
        urgent.result()
        assert [len(run.result()["token_ids"]) for run in (*old, equal)] == [99, 99, 99, 4]
        assert engine.stats()["counts"]["parked"] == 1


def test_no_row_is_parked_for_one_that_would_not_fit_beside_its_state():
    """What waits at the front waits on until parked states have gone, and gets its turn."""
    with budgeted(8, "model.delay_ms=3") as engine:
        over = []

        def seen(_event):
            bill = engine.stats()["memory"]["estimate"]
            over.append(bill["rows_bytes"] + bill["parked_bytes"] > bill["budget_bytes"])

        old = Running(engine, prompt_ids(600), max_tokens=60, seen=seen)  # 3 of 8
        next(iter(old))
        urgent = Running(engine, prompt_ids(1000), max_tokens=60, priority=1, seen=seen)  # 5
        next(iter(urgent))
        big = Running(engine, prompt_ids(1500), max_tokens=30, priority=1, seen=seen)  # 7
        assert len(urgent.result()["token_ids"]) == 59
        assert engine.stats()["counts"]["parked"] == 1
        assert len(old.result()["token_ids"]) == 59
        assert len(big.result()["token_ids"]) == 30
        assert engine.stats()["counts"]["parked"] == 1
        assert not any(over)


def test_a_parked_row_may_be_cancelled_and_a_failed_parking_is_mended(monkeypatch):
    with serving(
        "limits=budget", "limits.max_rows=1", "model.delay_ms=3", "drafter=none", "flow=plain",
        recipe="fake",
    ) as engine:  # fmt: skip
        old = Running(engine, [70], max_tokens=300)
        next(iter(old))
        urgent = Running(engine, [80], max_tokens=30, priority=1)
        next(iter(urgent))
        assert engine.stats()["memory"]["estimate"]["parked_bytes"] >= 0
        old.ticket.cancel()
        assert list(old)[-1].finish_reason == "cancelled"
        assert len(urgent.result()["token_ids"]) == 29

        old = Running(engine, [70], max_tokens=40)
        next(iter(old))
        capture, failures = type(engine._turns.active.rows).capture, [1]

        def failing(self, *arguments):
            if failures:
                raise MemoryError(failures.pop())
            return capture(self, *arguments)

        monkeypatch.setattr(type(engine._turns.active.rows), "capture", failing)
        assert len(Running(engine, [80], max_tokens=5, priority=1).result()["token_ids"]) == 5
        assert len(old.result()["token_ids"]) == 39


def test_what_is_allocated_stays_near_the_estimate_and_comes_back():
    """Chunks are short, since the values of a pass are no part of the estimate of rows."""
    overrides = (
        "model.layers=32",
        "model.context=4096",
        "limits.memory_gb=0.01",
        "tier=none",
        "stage.chunked_prefill.chunk=64",
    )
    with serving(
        *overrides, "limits=budget", "limits.work_gb=0", "flow=plain", "drafter=none", recipe="fake"
    ) as engine:
        base, most = mx.get_active_memory(), 0
        mx.reset_peak_memory()
        sizes = ((1500, 20), (700, 30), (1900, 10), (100, 40), (1000, 10), (2500, 5))
        runs = [Running(engine, prompt_ids(n, seed=n), max_tokens=m) for n, m in sizes]
        while (stats := engine.stats())["rows"]["open_requests"]:
            most = max(most, stats["memory"]["estimate"]["rows_bytes"])
            time.sleep(0.002)
        assert [len(run.result()["token_ids"]) for run in runs] == [m for _, m in sizes]
        assert 2e6 < mx.get_peak_memory() - base <= 1.2 * most <= 1.2 * 0.01e9
        assert mx.get_active_memory() - base < 1e6
