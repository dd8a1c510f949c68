"""Who resumes what: disconnects, equal requests at once, other clients, other wishes, several rows."""

from __future__ import annotations

import shutil

import pytest
from support import Running, prompt_ids, serving

from pipeline.types import Delta

PROMPT = prompt_ids(24)
SAMPLED = {"max_tokens": 48, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture
def engine(tmp_path):
    with opened(tmp_path / "states") as engine:
        yield engine


def opened(folder, *more):
    return serving(
        "flow=resumable", "drafter=ngram", "tier=[ram,disk]", f"tier.disk.path={folder}",
        "tier.disk.reserve_gb=0", "stage.progress_capture.checkpoint_tokens=8",
        "limits.max_rows=4", *more,
    )  # fmt: skip


def disk_of(engine):
    return engine.pipeline.parts["tier"][1]


class Slow(Running):
    """A request whose captures are waited for. `stop_at`: its client leaves after so many tokens."""

    def __init__(self, engine, prompt=PROMPT, stop_at=None, at=None, **wanted):
        self.out, self.engine, self.stop_at, self.at = [], engine, stop_at, at or {}
        super().__init__(engine, prompt, seen=self.seen, **{**SAMPLED, **wanted})

    def seen(self, event):
        if isinstance(event, Delta):
            self.out += event.token_ids
            disk_of(self.engine).queue.settle(wait_s=20.0)
            if self.stop_at and len(self.out) >= self.stop_at:
                self.ticket.cancel()
            for count in [count for count in self.at if len(self.out) >= count]:
                self.at.pop(count)()


def test_a_disconnect_and_the_same_request_again(engine):
    gone = Slow(engine, stop_at=30)
    assert list(gone)[-1].finish_reason == "cancelled"
    again = engine.generate(PROMPT, **SAMPLED)
    assert again["token_ids"][: len(gone.out)] == gone.out, "the seed was the server's own"
    assert again["resumed_tokens"] >= len(gone.out) - 8
    assert again["completion_tokens"] == 48
    other = engine.generate(PROMPT, **SAMPLED)
    assert other["resumed_tokens"] == 0 and other["seed"] != again["seed"]


def test_it_can_be_cut_off_again_and_again(engine):
    for stop_at in (12, 24, 36):
        gone = Slow(engine, stop_at=stop_at, seed=3)
        list(gone)
    again = engine.generate(PROMPT, **SAMPLED, seed=3)
    assert again["resumed_tokens"] >= 36 - 8
    cold = engine.generate(PROMPT, **{**SAMPLED, "max_tokens": 47}, seed=3)
    assert again["token_ids"][:47] == cold["token_ids"]
    records = disk_of(engine).store.shelf.records
    engine.when_idle(lambda: None).result(10)
    assert not records, "nothing of a complete answer is left to resume"


@pytest.mark.parametrize(
    "other",
    [{"seed": 4}, {"temperature": 0.5}, {"max_tokens": 47}, {"stop": ("x",)}, {"client": "b"},
     {"logprobs": 1}, {"prompt": PROMPT[:-1]}, {"repetition_penalty": 1.5}],
    ids=str,
)  # fmt: skip
def test_what_is_asked_differently_starts_anew(engine, other):
    list(Slow(engine, stop_at=20, seed=3))
    wanted = {**SAMPLED, "seed": 3, **other}
    assert engine.generate(wanted.pop("prompt", PROMPT), **wanted)["resumed_tokens"] == 0
    assert engine.generate(PROMPT, **SAMPLED, seed=3)["resumed_tokens"] >= 12


def test_equal_requests_at_once_do_not_meet(engine):
    runs = [Slow(engine) for _ in range(3)]
    results = [run.result() for run in runs]
    assert [result["resumed_tokens"] for result in results] == [0, 0, 0]
    assert len({result["seed"] for result in results}) == 3
    assert len({tuple(result["token_ids"]) for result in results}) == 3


def test_of_two_that_were_cut_off_each_goes_on_once(engine):
    gone = [Slow(engine, stop_at=stop_at) for stop_at in (20, 32)]
    for run in gone:
        list(run)
    results = [run.result() for run in [Slow(engine) for _ in range(3)]]
    for run in gone:
        whole = [r for r in results if r["token_ids"][: len(run.out)] == run.out]
        assert len(whole) == 1 and whole[0]["resumed_tokens"] >= len(run.out) - 8
    assert sorted(r["resumed_tokens"] > 0 for r in results) == [False, True, True]


def test_rows_beside_it_and_a_restart(engine, tmp_path):
    copy, prompts = tmp_path / "copy", [prompt_ids(n, seed=n) for n in (24, 9, 31, 17)]
    crash = {30: lambda: shutil.copytree(tmp_path / "states", copy)}
    runs = [Slow(engine, p, at=crash if p is prompts[0] else None, seed=1) for p in prompts]
    whole = [run.result() for run in runs]
    with opened(copy, "kv=paged") as other:
        assert other.generate(prompts[0], **SAMPLED, seed=1)["resumed_tokens"] == 0, (
            "another policy"
        )
    with opened(copy) as again:
        runs = [Running(again, prompt, **SAMPLED, seed=1) for prompt in prompts]
        results = [run.result() for run in runs]
    assert [r["token_ids"] for r in results] == [r["token_ids"] for r in whole]
    assert results[0]["resumed_tokens"] >= 22
    assert all(result["resumed_tokens"] > 0 for result in results)


def test_a_fault_while_it_is_captured_or_found_costs_no_answer(engine, monkeypatch):
    disk = disk_of(engine)
    monkeypatch.setattr(disk, "place", lambda state: 1 / 0)
    cold = Slow(engine, seed=5).result()
    monkeypatch.undo()
    list(Slow(engine, stop_at=20, seed=5))
    monkeypatch.setattr(disk.attempts, "left", lambda *where: 1 / 0)
    assert engine.generate(PROMPT, **SAMPLED, seed=5)["token_ids"] == cold["token_ids"]
    assert engine.stats()["counts"].get("faults", 0) == 0


def test_codes_that_begin_late(tmp_path):
    late = ("kv=kv8", "kv.start=20", "model.head_size=64")
    with opened(tmp_path, *late) as engine:
        engine.generate(PROMPT[:16], max_tokens=2)
        assert engine.flush()["durable"], "what the prompt begins with is there as computed"
        gone = Slow(engine, stop_at=30, seed=3)
        list(gone)
        again = engine.generate(PROMPT, **SAMPLED, seed=3)
    assert again["token_ids"][: len(gone.out)] == gone.out
    assert again["resumed_tokens"] >= len(gone.out) - 8


@pytest.mark.parametrize("error", [RuntimeError, IndexError])
def test_a_record_that_cannot_be_replayed_leaves_no_trace(tmp_path, monkeypatch, error):
    form = {**SAMPLED, "seed": 3, "grammar": {"regex": "[a-z]{20}[0-9]{30}"}}
    with opened(tmp_path, "constraint=llguidance") as engine:
        cold = Slow(engine, **form).result()
        list(Slow(engine, stop_at=30, **form))
        text = engine.pipeline.stages["resume"].text
        read = text.read
        monkeypatch.setattr(text, "read", lambda *what: read(*what) and _raise(error("odd")))
        again = engine.generate(PROMPT, **form)
        assert engine.stats()["counts"].get("faults", 0) == 0
    assert (again["token_ids"], again["text"]) == (cold["token_ids"], cold["text"])
    assert again["resumed_tokens"] == 0


def _raise(error):
    raise error
