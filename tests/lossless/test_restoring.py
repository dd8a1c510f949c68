"""A saved state is read while others go on: nobody waits for a disk but who starts from it, and not for long."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from support import Running, prompt_ids, serving

from stages.tiers.saved import format as form

SAVED, OTHER = prompt_ids(60), prompt_ids(60, seed=8)
WANTED = {"max_tokens": 8, "ignore_eos": True}


@contextmanager
def saved(tmp_path, *more: str):
    """An engine that has SAVED on disk alone, and its answer."""
    place = (f"tier.disk.path={tmp_path}", "tier.disk.reserve_gb=0", "tier.disk.segment_tokens=8")
    disk = ("tier=[ram,disk]", *place, *more)
    with serving(*disk) as engine:
        answer = engine.generate(SAVED, **WANTED)
        assert engine.flush()["durable"]
    with serving(*disk) as engine:
        yield engine, answer["token_ids"]


@pytest.fixture
def held(monkeypatch):
    """Reads wait for this."""
    free, read = threading.Event(), form.read_file
    monkeypatch.setattr(form, "read_file", lambda path: free.wait(30) and read(path))
    yield free
    free.set()


def test_others_go_on_while_a_state_is_read(tmp_path, held):
    with saved(tmp_path) as (engine, answer):
        waiting = Running(engine, SAVED, **WANTED)
        beside = Running(engine, OTHER, **WANTED)  # of the same length, so of the same group
        assert len(beside.result()["token_ids"]) == 8
        assert len(engine.generate(prompt_ids(20, seed=3), max_tokens=30)["token_ids"]) > 0
        assert waiting.events.qsize() <= 1, "Accepted, and nothing else"
        held.set()
        got = waiting.result()
        assert (got["token_ids"], got["cached_tokens"]) == (answer, 59)


def test_two_that_wait_for_the_same_state(tmp_path, held):
    with saved(tmp_path) as (engine, answer):
        both = [Running(engine, SAVED, **WANTED) for _ in range(2)]
        time.sleep(0.05)
        held.set()
        for got in (one.result() for one in both):
            assert (got["token_ids"], got["cached_tokens"]) == (answer, 59)


def test_who_leaves_while_reading_is_let_go(tmp_path, held):
    with saved(tmp_path) as (engine, answer):
        waiting = Running(engine, SAVED, **WANTED)
        time.sleep(0.05)
        waiting.ticket.cancel()
        assert waiting.result()["finish_reason"] == "cancelled"
        held.set()
        assert engine.generate(SAVED, **WANTED)["token_ids"] == answer


def test_a_disk_that_never_answers_is_a_miss_told_once(tmp_path, held, caplog):
    with saved(tmp_path, "tier.disk.timeout_s=0.2") as (engine, answer):
        for _ in range(3):
            engine.exclusive(engine.pipeline.parts["tier"][0].clear)
            got = engine.generate(SAVED, **WANTED)
            assert (got["token_ids"], got["cached_tokens"]) == (answer, 0)
        assert len([r for r in caplog.records if "takes too long" in r.message]) == 1
        held.set()
        time.sleep(0.1)
        engine.exclusive(engine.pipeline.parts["tier"][0].clear)
        assert engine.generate(SAVED, **WANTED)["cached_tokens"] == 59, "it answers again"


def test_many_slow_files_share_one_deadline(tmp_path, monkeypatch):
    read = form.read_file
    monkeypatch.setattr(form, "read_file", lambda path: time.sleep(0.15) or read(path))
    with saved(tmp_path, "tier.disk.timeout_s=0.4") as (engine, answer):
        got = engine.generate(SAVED, **WANTED)
        assert (got["token_ids"], got["cached_tokens"]) == (answer, 0), "eight files of 0.15 s"


def test_a_damaged_file_leaves_what_comes_before_it(tmp_path):
    """Found out on the I/O thread; the row then asks for what is left."""
    with saved(tmp_path) as (engine, answer):
        disk = engine.pipeline.parts["tier"][1]
        bad = next(f for f in disk.store.shelf.files.values() if f.kind == "run" and f.start == 32)
        path = disk.store.folder.path(bad.name)
        path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
        got = engine.generate(SAVED, **WANTED)
        assert (got["token_ids"], got["cached_tokens"]) == (answer, 32)
        assert engine.stats()["tiers"]["disk"]["corrupt"] == 1
