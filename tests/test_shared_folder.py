"""Several servers on one folder, whatever their settings: what one wrote stays, and is found by the others."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import time

import pytest
from test_disk_tier import files, found, opened, written

from pipeline.errors import OpenError
from stages.tiers.saved import format as form
from tests.truth import FULL, MIXES, capture


def both(tmp_path, first=8, second=5):
    return opened(tmp_path, segment_tokens=first), opened(tmp_path, segment_tokens=second)


@pytest.mark.parametrize("mix", ["full", "windows", "everything"])
def test_runs_cut_at_other_places_are_kept_and_found(tmp_path, mix):
    """Neither knows what the other writes, so that the same tokens are there twice, cut differently,
    and what goes on from each names its own."""
    one, two = both(tmp_path)
    root = list(range(30))
    for turn in range(4):
        for tier, mark in ((one, 50), (two, 60)):
            tokens = [*root[: 12 + 6 * turn], *[mark] * (4 + turn)]
            tier.put(capture(MIXES[mix], tokens))
            written(tier)
    one.close()
    two.close()
    before = files(tmp_path)
    for segment in (8, 5, 3):
        tier = opened(tmp_path, segment_tokens=segment)
        assert tier.store.removed == 0
        for turn in range(4):
            for mark in (50, 60):
                tokens = [*root[: 12 + 6 * turn], *[mark] * (4 + turn)]
                assert found(tier, tokens) == len(tokens)
        tier.close()
    assert files(tmp_path) == before


def test_at_random_and_at_once(tmp_path):
    """What was written last by either is found by both after a look at the folder; everything by the next."""
    rng, tiers, said = random.Random(5), list(both(tmp_path)), []
    for _ in range(60):
        tier = rng.choice(tiers)
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 6))] + [7] * rng.randrange(30)
        tier.put(capture(MIXES["everything"], tokens))
        written(tier)
        said.append(tokens)
    for tier in tiers:
        tier.store.sync(force=True)
        tier.check_integrity()
        assert all(found(tier, tokens) == len(tokens) for tokens in said)
        tier.close()
    tier = opened(tmp_path)
    assert tier.store.removed == 0
    assert all(found(tier, tokens) == len(tokens) for tokens in said)
    while tier.store.evict_one():
        tier.check_integrity()
    tier.close()
    assert files(tmp_path) == [], "what nothing stands on any more can go, the last of it too"


def test_what_others_hold_too_is_not_lost_with_a_damaged_file(tmp_path):
    one, two = both(tmp_path)
    for tier in (one, two):
        tier.put(capture((FULL,), range(30)))
        written(tier)
        tier.close()
    tier = opened(tmp_path)
    damaged = next(f for f in tier.store.shelf.files.values() if f.kind == "run" and f.start == 0)
    path = tier.store.folder.path(damaged.name)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert found(tier, range(30)) == 30, "from the other's files"
    tier.close()


def test_a_file_that_cannot_be_read_keeps_what_stands_on_it(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(30)))
    written(tier)
    tier.close()
    before = files(tmp_path)
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    plain, busy = form.open_plain, before[0]

    def sometimes(path):
        if path == busy:
            raise OSError(errno.EMFILE, "too many open files")
        return plain(path)

    with monkeypatch.context() as patch:
        patch.setattr(form, "open_plain", sometimes)
        opened(tmp_path).close()
    assert files(tmp_path) == before
    tier = opened(tmp_path)
    assert found(tier, range(30)) == 30
    tier.close()


def test_two_processes_share_a_folder(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path)
    one.put(capture((FULL,), range(30)))
    written(one)
    two.put(capture((FULL,), [*range(20), 5, 5]))
    written(two)
    assert found(two, [*range(20), 5, 5]) == 22
    two.store.sync(force=True)
    assert found(two, range(30)) == 30
    while one.store.evict_one():
        pass
    assert found(two, range(30)) == 0, "removed by the other: a miss"
    two.put(capture((FULL,), range(30)))
    written(two)
    assert found(two, range(30)) == 30
    one.close()
    two.close()


PROCESS = """
import sys; sys.path[:0] = [".", "tests"]
from tests.test_disk_tier import opened, written, found
from tests.truth import FULL, capture
tier = opened(sys.argv[1], max_gb=0.0015)
for turn in range(25):
    tokens = [int(sys.argv[2]) if turn % 2 else 0] * 20 + [turn]
    tier.put(capture((FULL,) * 8, tokens)); written(tier); assert found(tier, tokens) in (0, 21)
assert tier.stats()["failed"] == 0
tier.close()
"""


def test_four_processes_at_once_on_an_empty_folder(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    running = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE) for n in range(1, 5)]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()[-2000:]
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= 1_600_000


def held(tmp_path):
    handle = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_a_folder_that_is_held_for_ever_holds_nobody_up(tmp_path):
    tier = opened(tmp_path, timeout_s=0.2)
    handle = held(tmp_path)
    tier.put(capture((FULL,), range(8)))
    began = time.monotonic()
    assert tier.idle_step(), "later"
    assert time.monotonic() - began < 0.1
    assert tier.stats()["failed"] == 0
    time.sleep(0.25)
    written(tier)
    assert tier.stats()["failed"] == 1, "it was given up, and that is said"
    with pytest.raises(OpenError, match="another process holds its lock"):
        opened(tmp_path, timeout_s=0.1)
    os.close(handle)
    tier.put(capture((FULL,), range(8)))
    written(tier)
    assert found(tier, range(8)) == 8
    tier.close()


def test_clocks_that_jump_change_nothing(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    for name, now in ((1, 2e9), (2, 0.0), (3, 4e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        tier.put(capture((FULL,), [name] * 8))
        written(tier)
        for path in files(tmp_path):
            os.utime(path, (now, now))
    assert found(tier, [1] * 8) == 8
    tier.close()
    tier = opened(tmp_path)
    tier.store.evict_one()
    assert [found(tier, [name] * 8) for name in (1, 2, 3)] == [8, 0, 8], "by use, not by dates"
    tier.close()


def test_a_folder_that_becomes_read_only_is_read_and_not_written(tmp_path, monkeypatch, caplog):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(8)))
    written(tier)

    def refused(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tier.store.folder, "begin", refused)
    monkeypatch.setattr(tier.store.folder, "remove", refused)
    tier.put(capture((FULL,), [*range(8), *[9] * 8]))
    written(tier)
    assert found(tier, [*range(8), *[9] * 8]) == 8
    assert tier.stats()["failed"] == 1
    assert "Read-only file system" in caplog.text
    tier.close()


def test_a_read_only_folder_is_said_at_open(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OpenError, match=r"tier\.disk\.path: .* Read-only file system"):
        opened(tmp_path)
