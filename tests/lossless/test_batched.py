"""Batched == alone, whatever joins, leaves, is cancelled or fails beside a row."""

from __future__ import annotations

import time

import pytest
from support import CONFIGS, Running, prompt_ids, serving, together

from pipeline.types import Delta

PROMPTS = [prompt_ids(n, seed=n) for n in (3, 16, 31, 50)]
WANTED = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 11},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_k": 20, "seed": 5},
]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def alone(family):
    with serving(f"model.family={family}", "flow=plain", "drafter=none", "tier=none") as engine:
        return [
            engine.generate(prompt, max_tokens=40, ignore_eos=True, **wanted)["token_ids"]
            for prompt, wanted in zip(PROMPTS, WANTED, strict=True)
        ]


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request, family, alone):
    with serving(f"model.family={family}", "tier=none", *CONFIGS[request.param]) as engine:
        engine.pipeline.parts["drafter"].book = [
            prompt + ids for prompt, ids in zip(PROMPTS, alone, strict=True)
        ]
        yield engine


def start(engine, index, **more):
    wanted = {"max_tokens": 40, "ignore_eos": True, **WANTED[index], **more}
    return Running(engine, PROMPTS[index], **wanted)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_rows_in_any_order_equal_each_alone(engine, alone, order):
    runs = {index: start(engine, index) for index in order}
    for index, run in runs.items():
        assert run.result()["token_ids"] == alone[index], index


def test_a_row_that_joins_others_in_mid_answer_changes_nothing(engine, alone):
    first = start(engine, 0)
    events = iter(first)
    head = next(events)
    rest = [start(engine, index) for index in (1, 2, 3)]
    assert isinstance(head, Delta)
    ids = [*head.token_ids, *(t for e in events if isinstance(e, Delta) for t in e.token_ids)]
    assert ids == alone[0]
    assert [run.result()["token_ids"] for run in rest] == alone[1:]


def test_a_prompt_of_one_token_joins_others(engine):
    solo = Running(engine, [70], max_tokens=12, ignore_eos=True).result()["token_ids"]
    other = start(engine, 3)
    next(iter(other))
    assert Running(engine, [70], max_tokens=12, ignore_eos=True).result()["token_ids"] == solo
    other.ticket.cancel()


def test_a_cancelled_row_leaves_no_trace(engine, alone):
    doomed = start(engine, 3, max_tokens=4000)
    runs = [start(engine, index) for index in (0, 1, 2)]
    next(iter(doomed))
    doomed.ticket.cancel()
    assert [run.result()["token_ids"] for run in runs] == alone[:3]
    assert list(doomed)[-1].finish_reason == "cancelled"
    assert engine.stats()["rows"]["open_requests"] == 0


STAGES = ["chunked_prefill", "draft", "verify", "accept", "detokenize", "commit"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", STAGES)
def test_a_fault_of_one_step_is_mended_from_the_token_lists(
    engine, alone, monkeypatch, name, after
):
    if name not in engine.pipeline.stages:
        assert name == "draft"
        return
    stage = engine.pipeline.stages[name]
    run, calls = type(stage).run, []

    def faulty(batch):
        calls.append(1)
        due = len(calls) in (3, 8)
        if due and not after:
            raise RuntimeError("out of memory, say")
        run(stage, batch)
        if due:
            raise RuntimeError("out of memory, say")

    monkeypatch.setattr(stage, "run", faulty)
    runs = [start(engine, index) for index in range(4)]
    assert [run.result()["token_ids"] for run in runs] == alone


def test_a_row_that_carries_a_fault_fails_without_the_others(engine, alone, monkeypatch):
    verify = engine.pipeline.stages["verify"]
    run = type(verify).run

    def faulty(batch):
        if any(s.request.id == "cursed" and len(s.output_ids) > 4 for s in batch.sequences):
            raise RuntimeError("a row that no kernel likes")
        run(verify, batch)

    monkeypatch.setattr(verify, "run", faulty)
    doomed = start(engine, 1, id="cursed")
    runs = [start(engine, index) for index in (0, 2, 3)]
    with pytest.raises(RuntimeError, match="no kernel likes"):
        doomed.result()
    assert [run.result()["token_ids"] for run in runs] == [alone[0], *alone[2:]]


def test_a_row_whose_sampling_fails_takes_nobody_with_it(engine, alone):
    doomed = start(engine, 1, logit_bias=((5, float("nan")),))
    runs = [start(engine, index) for index in (0, 2, 3)]
    with pytest.raises(Exception, match=r"finite|logit_bias"):
        doomed.result()
    assert [run.result()["token_ids"] for run in runs] == [alone[0], *alone[2:]]


def test_one_target_forward_a_round_whatever_the_rows(engine):
    before = engine.stats()
    results = together(
        engine, [prompt_ids(8, seed=s) for s in range(4)], max_tokens=12, ignore_eos=True
    )
    after = engine.stats()
    rounds = after["counts"]["rounds"] - before["counts"]["rounds"]
    assert rounds < sum(r["speculation"]["rounds"] for r in results)
    prefills = 4 * 1  # prompts of 8 tokens take one chunk each, at most
    assert rounds < after["target_calls"] - before["target_calls"] <= rounds + prefills


def test_work_that_is_no_request_waits_for_its_turn(engine, alone):
    run = start(engine, 0)
    idle = engine.when_idle(lambda: len(engine._turns.active.sequences))
    assert engine.exclusive(lambda: engine._turns.rows_in_use) == 0
    assert idle.result(10) == 0
    assert run.result()["token_ids"] == alone[0]


def test_the_engine_is_quiet_when_nothing_is_asked(engine):
    before = engine.stats()["counts"]
    time.sleep(0.05)
    assert engine.stats()["counts"] == before
