"""Idle work between memory and disk: bounded, retried, billed, and no use of what it looks at."""

from __future__ import annotations

import errno
import threading
import time
from types import SimpleNamespace

import pytest

import stages.spill
from pipeline.types import Batch
from stages.adapters.none import NoAdapters
from stages.limits.budget import QUEUE_SHARE, Budget
from stages.rows.state import state_bytes
from stages.spill import Spill
from stages.tiers.ram import Ram
from stages.tiers.saved import format as form
from stages.tiers.saved import queue
from tests.test_disk_tier import files, found, opened, written
from tests.truth import FULL, capture

NOBODY = Batch([], None, None)


@pytest.fixture
def pair(tmp_path):
    """A memory tier, a disk tier, and the stage between them; nothing waits for its time."""
    ram, disk = Ram(max_gb=1, entry_bytes=0), opened(tmp_path)
    spill = Spill([ram, disk], debounce_s=0)
    spill.open()
    yield ram, disk, spill
    disk.close()


def rest(spill, disk, turns=200):
    """Idle until nothing is to be done at once."""
    for _ in range(turns):
        spill.run(NOBODY)
        disk.wait(0.05)
        if spill.again_s is None or spill.again_s > 0.01:
            return
        time.sleep(spill.again_s)
    raise AssertionError("it never rests")


def test_spilling_is_no_use_of_a_state(pair):
    ram, disk, spill = pair
    for name in range(5):
        ram.put(capture((FULL,), [name] * 8))
    rest(spill, disk)
    assert disk.durable([3] * 8, "n")
    assert (ram.stats()["hits"], ram.stats()["misses"]) == (0, 0)
    assert (disk.stats()["hits"], disk.stats()["misses"]) == (0, 0)


def test_what_could_not_be_written_is_tried_again_while_idle(pair, monkeypatch):
    ram, disk, spill = pair
    monkeypatch.setattr(stages.spill, "RETRY_S", (0.05, 0.2))
    spill._retry_s = 0.05

    def full(*what):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(form, "_write_array", full)
        ram.put(capture((FULL,), [1] * 8))
        rest(spill, disk)
        assert spill.stats()["dirty"] == 1
        assert 0 < spill.again_s <= 0.2, "it will be back"
    until = time.monotonic() + 5
    while spill.stats()["dirty"] and time.monotonic() < until:
        time.sleep(0.02)
        rest(spill, disk)
    assert disk.durable([1] * 8, "n")


def test_what_the_queue_gave_up_is_tried_again_when_memory_lets_it_go(pair, monkeypatch):
    ram, disk, spill = pair
    monkeypatch.setattr(stages.spill, "RETRY_S", (1000.0, 1000.0))
    spill._retry_s = 1000.0
    with monkeypatch.context() as patch:
        patch.setattr(disk, "put", lambda state: False)
        ram.put(capture((FULL,), [1] * 8))
        rest(spill, disk)
    assert not disk.durable([1] * 8, "n")
    ram.shrink(0)
    rest(spill, disk)
    assert disk.durable([1] * 8, "n")


@pytest.mark.parametrize("bound", ["MOST_DIRTY", "MOST_DIRTY_BYTES"])
def test_what_is_remembered_is_bounded_and_what_is_lost_is_told(pair, bound, monkeypatch):
    ram, _, spill = pair
    monkeypatch.setattr(stages.spill, bound, 4 if bound == "MOST_DIRTY" else 4 * 8 * 4)
    for name in range(10):
        ram.put(capture((FULL,), [name] * 8))
    assert (spill.stats()["dirty"], spill.stats()["lost"]) == (4, 6)
    while (report := spill.flush_step()) is None:
        pass
    assert report["durable"], "what was lost before this flush is not of this flush"
    assert spill.stats()["dirty"] == 0


def test_idle_states_leave_memory_once_they_are_on_disk(tmp_path):
    ram, disk = Ram(max_gb=1, entry_bytes=0), opened(tmp_path)
    spill = Spill([ram, disk], debounce_s=0, idle_s=0.1)
    spill.open()
    ram.put(capture((FULL,), range(20)))
    ram.put(capture((FULL,), [*range(8), 9]))
    until = time.monotonic() + 10
    while ram.stats()["tokens"] and time.monotonic() < until:
        rest(spill, disk)
        time.sleep(0.02)
    assert (ram.stats()["tokens"], ram.stats()["demotions"]) == (0, 3)
    assert len(disk.lookup(range(20), "n", 20).state.tokens) == 20
    assert len(disk.lookup([*range(8), 9], "n", 9).state.tokens) == 9
    disk.close()


def test_a_budget_bills_what_waits_to_be_written(tmp_path):
    """Memory and queue together stay within what rows leave; the queue gives up first what is oldest."""
    one = state_bytes(capture((FULL,), [1] * 8))
    ram, disk = Ram(max_gb=1, entry_bytes=0), opened(tmp_path)
    spill = Spill([ram, disk], debounce_s=0)
    spill.open()
    target = SimpleNamespace(weight_bytes=0, specs=(), context_len=100)
    part, depth = SimpleNamespace(), SimpleNamespace(max=1)
    kv = SimpleNamespace(bytes_per_token=lambda target: 1.0)
    device = SimpleNamespace(limit_memory=lambda nbytes: {})
    limits = Budget(
        device, target, kv, depth, part, target, NoAdapters(), [ram, disk],
        memory_gb=16 * one / 1e9, work_gb=0.0,
    )  # fmt: skip
    for name in range(30):
        ram.put(capture((FULL,), [name] * 8))
        disk.put(capture((FULL,), [name] * 8))
    limits._share(16 * one)
    for name in range(30, 60):
        ram.put(capture((FULL,), [name] * 8))
        held = [tier.stats()["memory_bytes"] for tier in (ram, disk)]
        assert sum(held) <= 16 * one and held[1] <= 16 * one // QUEUE_SHARE
    assert limits.stats([])["estimate"]["tiers_bytes"] == sum(held)
    assert held[0] == 12 * one
    limits._share(one)
    assert sum(tier.stats()["memory_bytes"] for tier in (ram, disk)) <= one
    disk.check_integrity()
    ram.check_integrity()
    disk.close()
    assert files(tmp_path) == []


def test_what_cannot_be_made_a_file_holds_up_nothing(tmp_path, monkeypatch):
    tier, made, bad = opened(tmp_path), queue.to_host, [RuntimeError("no memory for it")]

    def once(arrays):
        if bad:
            raise bad.pop()
        return made(arrays)

    monkeypatch.setattr(queue, "to_host", once)
    for name in (1, 2):
        tier.put(capture((FULL,), [name] * 8))
    written(tier)
    assert (found(tier, [1] * 8), found(tier, [2] * 8)) == (0, 8)
    assert (tier.stats()["failed"], tier.stats()["pending"]) == (1, 0)
    tier.close()


def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch):
    tier, go = opened(tmp_path, timeout_s=0.05), threading.Event()
    tier.put(capture((FULL,), [1] * 8))
    written(tier)
    asked = []
    for name in ("set_uses", "close"):
        monkeypatch.setattr(tier.store.index, name, lambda *what, name=name: asked.append(name))
    hangs = tier.store.io.submit(go.wait, 20.0)
    tier.close()
    assert not asked and not hangs.done(), "nothing that is on that disk was waited for"
    go.set()
    hangs.result(5.0)
