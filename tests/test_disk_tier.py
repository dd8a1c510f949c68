"""The disk tier: restarts, bounds, other processes, and a folder that misbehaves."""

from __future__ import annotations

import errno
import pickle
import random
import shutil
import sqlite3
import stat
import threading
import time

import pytest

from pipeline.errors import OpenError
from stages.rows.state import check
from stages.tiers.disk import RETRY_S, Disk
from stages.tiers.saved import format as form
from stages.tiers.saved.index import Index
from tests.truth import FULL, MIXES, assert_true, capture


class Plain:
    """Stands for a model and a KV policy."""

    def bytes_per_token(self, target):
        return 1000.0


def opened(path, **settings):
    settings = {"segment_tokens": 8, "reserve_gb": 0.0, "max_gb": 1.0, **settings}
    tier = Disk(Plain(), Plain(), path=str(path), **settings)
    tier.open()
    return tier


def written(tier):
    while tier.idle_step():
        tier.wait(0.1)
    tier.check_integrity()


def found(tier, tokens, namespace="n"):
    """Length of what is found, after it was verified to be true."""
    match = tier.lookup(tokens, namespace, len(tokens))
    tier.check_integrity()
    if match is None:
        return 0
    check(match.state)
    assert_true(match.state)
    assert match.state.namespace == namespace
    return len(match.state.tokens)


def files(path):
    return sorted((path / "files").rglob("*.safetensors"))


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_states_are_there_after_a_restart(tmp_path, mix):
    tokens = list(range(30))
    tier = opened(tmp_path)
    tier.put(capture(MIXES[mix], tokens))
    tier.put(capture(MIXES[mix], [*tokens[:19], 7, 7, 7], start=0))
    assert not tier.durable(tokens, "n")
    written(tier)
    assert tier.durable(tokens, "n")
    tier.close()
    tier = opened(tmp_path)
    assert tier.stats()["tokens"] == 30 + 3
    assert found(tier, tokens) == 30
    assert found(tier, [*tokens[:19], 7, 7, 7, 8]) == 22
    assert found(tier, tokens, "another") == 0
    assert found(tier, [*tokens[:12], 99]) == (12 if mix == "full" else 0)
    tier.close()


def test_a_lost_index_is_made_from_the_files(tmp_path):
    tier = opened(tmp_path)
    tier.put(capture(MIXES["everything"], range(30)))
    written(tier)
    tier.close()
    for path in (tmp_path / "index").iterdir():
        path.write_bytes(b"nonsense")
    tier = opened(tmp_path)
    assert found(tier, range(30)) == 30
    assert len(dict(tier.store.index.rows())) == 5
    tier.close()


HOSTILE = {  # what is done to the row of a file, or put beside it
    "a pickle": "UPDATE Cache SET mode=4, value=:bomb WHERE key=:name",
    "a path to delete": "UPDATE Cache SET mode=2, filename=:victim, value=NULL WHERE key=:name",
    "a path to read": "UPDATE Cache SET mode=3, filename=:victim, value=NULL WHERE key=:name",
    "another's row": "UPDATE Cache SET value=(SELECT value FROM Cache WHERE key=:other) WHERE key=:name",
    "a path as a name": "INSERT INTO Cache (key, raw, mode, value) VALUES ('../../x', 1, 0, '{}')",
    "a lie": 'UPDATE Cache SET value=replace(value, \'"namespace": "n"\', \'"namespace": "m"\') WHERE key=:name',
    "a pickle as a name": "INSERT INTO Cache (key, raw, mode, value) VALUES (:bomb, 0, 0, 'x')",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_rows_do_nothing(tmp_path, kind):
    """Each is read, and alone: a name that is no text costs the index, with all other rows in it."""
    victim = tmp_path / "victim"
    victim.write_text("keep")
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (type(ran).touch, (ran,))

    cache = tmp_path / "cache"
    tier = opened(cache)
    tier.put(capture((FULL,), range(30)))
    tier.put(capture((FULL,), [*range(8), *[60] * 8]))
    written(tier)
    tier.close()
    name, other, *_ = (path.stem for path in files(cache))
    bomb = memoryview(pickle.dumps(Bomb()))
    with sqlite3.connect(cache / "index" / "cache.db") as db:
        done = db.execute(
            HOSTILE[kind], {"bomb": bomb, "victim": str(victim), "name": name, "other": other}
        )
        assert done.rowcount == 1
    db.close()
    shutil.copytree(cache / "index", tmp_path / "copy")
    index = Index(tmp_path / "copy")
    index.open()
    rows = dict(index.rows())
    assert (index.failures == 1) == (kind == "a pickle as a name")
    assert (name in rows) == (kind in ("another's row", "a path as a name", "a lie"))
    index.close()
    tier = opened(cache)
    for tokens in (range(30), [*range(8), *[60] * 8]):
        assert found(tier, list(tokens)) >= 0  # true or nothing
    tier.close()
    assert victim.read_text() == "keep"
    assert not ran.exists()


def test_a_folder_that_others_may_enter_is_shut(tmp_path):
    """One that also holds what is not ours stays as it is; ours within it does not."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    for root in (mine, shared):
        for path in (root, root / "files", root / "index"):
            path.mkdir(mode=0o777)
            path.chmod(0o777)
    (shared / "notes.txt").write_text("somebody's")
    for root in (mine, shared):
        opened(root).close()
    mode = {
        path: stat.S_IMODE(path.stat().st_mode) for path in (*mine.glob("*/"), *shared.glob("*/"))
    }
    assert set(mode.values()) == {0o700} and len(mode) == 4
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777


@pytest.mark.parametrize("name", ["lock", "attempts", "files", "index"])
def test_what_should_be_ours_and_is_a_link_is_refused(tmp_path, name):
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    cache.mkdir()
    (cache / name).symlink_to(victim)
    if name in ("files", "index"):
        victim.mkdir()
    with pytest.raises(OpenError, match=r"tier\.disk\.path: .* cannot be used"):
        opened(cache)
    assert not victim.exists() or not list(victim.iterdir())


def test_a_bad_file_is_dropped_without_the_owner_touching_the_disk(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(30)))
    written(tier)
    first = next(f for f in tier.store.shelf.files.values() if f.start == 0)
    path = tier.store.folder.path(first.name)
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    owner, touched = threading.current_thread(), []
    for part, name in [
        (tier.store.folder, "remove"),
        (tier.store.index, "delete"),
        (form, "open_plain"),
    ]:
        method = getattr(part, name)

        def noticed(*args, method=method, name=name):
            touched.append((name, threading.current_thread() is owner))
            return method(*args)

        monkeypatch.setattr(part, name, noticed)
    reading = tier.fetch(range(30), "n", 30)
    reading.wait()
    assert reading.take() is None
    assert tier.usable(range(30), "n", 30) == 0, "nothing stands on a file that is bad"
    tier.store.take_back(10.0)
    assert {name for name, _ in touched} == {"remove", "delete", "open_plain"}
    assert not [name for name, mine in touched if mine]
    assert not path.exists()
    tier.check_integrity()
    tier.put(capture((FULL,), range(30)))
    written(tier)
    assert found(tier, range(30)) == 30
    tier.close()


def test_rows_too_deep_to_be_read_are_no_rows(tmp_path):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(8)))
    written(tier)
    tier.close()
    with sqlite3.connect(tmp_path / "index" / "cache.db") as db:
        db.execute("UPDATE Cache SET value=?", ("[" * 100_000,))
    db.close()
    tier = opened(tmp_path)
    assert found(tier, range(8)) == 8
    tier.close()


def test_changed_swapped_and_foreign_files_are_misses(tmp_path):
    rng = random.Random(1)
    tokens = list(range(40))
    for turn in range(30):
        tier = opened(tmp_path)
        tier.put(capture(MIXES["everything"], tokens))
        tier.put(capture(MIXES["everything"], [9, 9, *tokens], "other"))
        written(tier)
        paths = files(tmp_path)
        one, other = rng.sample(paths, 2)
        data = bytearray(one.read_bytes())
        if turn % 3 == 0:
            data[rng.randrange(len(data))] ^= 255
            one.write_bytes(data)
        elif turn % 3 == 1:
            one.write_bytes(other.read_bytes())
        else:
            one.unlink()
        if turn % 2:
            tier.close()
            tier = opened(tmp_path)
        assert found(tier, tokens) in (0, 40)
        assert found(tier, [9, 9, *tokens], "other") in (0, 42)
        tier.put(capture(MIXES["everything"], tokens))
        assert found(tier, tokens) == 40, "it can be saved again"
        tier.close()


@pytest.fixture
def quick(monkeypatch):
    """A last token's own value instead of a hash of all before it: for long states."""
    monkeypatch.setattr("tests.truth.value", lambda layer, name, prefix: float(prefix[-1]))


def test_the_folder_stays_under_its_cap_and_foreign_files_stay(tmp_path, quick):
    foreign = tmp_path / "files" / "ab" / ("0" * 39 + ".safetensors")
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(300_000))
    (tmp_path / "note.txt").write_text("mine")
    tier = opened(tmp_path, max_gb=0.002, segment_tokens=400)
    total = 0
    for name in range(60):
        tier.put(capture((FULL,) * 4, [name] * 400, f"model {name % 3}"))
        written(tier)
        total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert total <= 2_000_000
    assert tier.stats()["evictions"] > 20
    assert total > 1_200_000
    assert found(tier, [59] * 400, "model 2") == 400
    assert found(tier, [0] * 400, "model 0") == 0
    tier.close()
    tier = opened(tmp_path, max_gb=0.0015, segment_tokens=400)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1_500_000
    assert foreign.stat().st_size == 300_000
    assert (tmp_path / "note.txt").read_text() == "mine"
    tier.close()


def test_who_was_used_last_is_known_after_a_restart(tmp_path):
    tier = opened(tmp_path)
    for name in (1, 2, 3):
        tier.put(capture((FULL,), [name] * 8))
        written(tier)
    assert found(tier, [1] * 8) == 8
    tier.close()
    tier = opened(tmp_path)
    tier.store.evict_one()
    assert [found(tier, [name] * 8) for name in (1, 2, 3)] == [8, 0, 8]
    tier.close()


def test_folders_and_files_are_private(tmp_path):
    root = tmp_path / "a" / "b"
    tier = opened(root)
    tier.put(capture((FULL,), range(8)))
    written(tier)
    tier.close()
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_what_a_dead_writer_left_is_swept_and_what_a_live_one_writes_is_not(tmp_path):
    tier = opened(tmp_path)
    draft = tier.store.folder.begin("a" * 40, 1000)
    dead = draft.path.with_name("b" * 40 + ".0123456789abcdef.tmp")
    dead.write_bytes(b"half")
    other = opened(tmp_path)
    assert not dead.exists()
    assert draft.path.exists()
    tier.store.folder.discard(draft)
    other.close()
    tier.close()


def test_a_full_disk_loses_what_cannot_be_written_and_nothing_else(tmp_path, monkeypatch, caplog):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(8)))
    written(tier)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(form, "_write_array", full)
        for name in (1, 2):
            tier.put(capture((FULL,), [*range(8), *[name] * 8]))
            assert found(tier, [*range(8), *[name] * 8]) == 16, "readable while it waits"
            written(tier)
    assert [found(tier, [*range(8), *[name] * 8]) for name in (1, 2)] == [8, 8]
    assert tier.stats()["failed"] == 2
    assert tier.store.total == tier.store.folder.scan().total, "room is not billed for them"
    assert len([r for r in caplog.records if "could not be written" in r.message]) == 1
    assert not list(tmp_path.rglob("*.tmp"))
    tier.put(capture((FULL,), [*range(8), *[3] * 8]))
    written(tier)
    assert found(tier, [*range(8), *[3] * 8]) == 16
    tier.close()


def test_a_reserve_is_left_free(tmp_path):
    with pytest.raises(OpenError, match=r"tier\.disk\.reserve_gb: .* nothing could be written"):
        opened(tmp_path, reserve_gb=1e9)
    tier = opened(tmp_path)
    tier.store.reserve = 1 << 60
    tier.put(capture((FULL,), range(8)))
    written(tier)
    assert (tier.stats()["failed"], files(tmp_path)) == (1, [])
    tier.close()


def test_a_folder_that_goes_away_is_a_miss(tmp_path):
    root = tmp_path / "cache"
    tier = opened(root)
    tier.put(capture((FULL,), range(8)))
    written(tier)
    shutil.rmtree(root)
    assert found(tier, range(8)) == 0
    tier.put(capture((FULL,), [5] * 8))
    written(tier)
    assert tier.stats()["failed"] == 1
    tier.close()


def test_a_read_that_hangs_is_a_miss_until_it_ends(tmp_path, monkeypatch):
    tier = opened(tmp_path, timeout_s=0.05)
    tier.put(capture((FULL,), range(8)))
    written(tier)
    slow = form.read_file
    monkeypatch.setattr(form, "read_file", lambda path: time.sleep(0.3) or slow(path))
    assert found(tier, range(8)) == 0
    monkeypatch.undo()
    assert tier.usable(range(8), "n", 8) == 0
    time.sleep(0.4)
    tier.timeout_s = 10.0  # whatever else this machine does
    assert found(tier, range(8)) == 8
    tier.close()


def test_the_queue_is_bounded_and_gives_up_the_oldest(tmp_path):
    tier = opened(tmp_path, queue_gb=2000e-9)
    size = 8 * 2 * 2 * 3 * 4
    for name in range(1, 10):
        assert tier.put(capture((FULL,), [name] * 8))
        assert tier.stats()["pending_bytes"] <= max(2000, size)
    assert found(tier, [9] * 8) == 8
    assert found(tier, [1] * 8) == 0
    assert tier.stats()["dropped"] == 9 - 2000 // size
    assert tier.put(capture((FULL,), [20] * 80)), "one larger than the queue is still taken"
    written(tier)
    assert found(tier, [20] * 80) == 80
    tier.close()


@pytest.mark.parametrize("where", ["a file", "below a file", "a dangling link"])
def test_a_folder_that_cannot_be_is_said_at_open(tmp_path, where):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    path = {"a file": "file", "below a file": "file/sub", "a dangling link": "link"}[where]
    with pytest.raises(OpenError, match=r"tier\.disk\.path: .* cannot be used"):
        opened(tmp_path / path)


def test_a_cap_below_one_segment_is_said_at_open(tmp_path):
    with pytest.raises(OpenError, match="less than one segment of 4096 tokens"):
        opened(tmp_path, max_gb=0.002, segment_tokens=4096)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_gb", 0), ("segment_tokens", 0), ("queue_gb", -1), ("reserve_gb", -1), ("timeout_s", 0)],
)
def test_settings_that_cannot_work_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Disk(Plain(), Plain(), **{name: value})


def test_fifty_branches_store_their_prefix_once(tmp_path, quick):
    tier = opened(tmp_path, segment_tokens=512)
    root = list(range(2000))
    for branch in range(50):
        tier.put(capture((FULL,), [*root, *[5000 + branch] * 100]))
    written(tier)
    data = (2000 + 50 * 100) * 2 * 2 * 3 * 4
    headers = 1500 * len(files(tmp_path))  # nothing beside real models' segments
    stored = sum(p.stat().st_size for p in files(tmp_path)) - headers
    assert tier.stats()["tokens"] == 7000
    assert stored <= 1.15 * data
    tier.close()


def test_a_file_that_cannot_be_read_just_now_stays(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(30)))
    written(tier)
    before = files(tmp_path)

    def too_many(path):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(form, "open_plain", too_many)
        assert found(tier, range(30)) == 0
        tier.store.sync(force=True)
    assert files(tmp_path) == before
    time.sleep(RETRY_S)
    assert found(tier, range(30)) == 30
    tier.close()


def test_what_is_given_up_while_it_is_written_leaves_the_queue(tmp_path):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(30)))
    first = next(iter(tier.queue.files.values()))
    assert tier.idle_step()
    tier.store.shelf.forget(first)
    written(tier)
    assert not tier.queue.files
    assert files(tmp_path) == []
    tier.close()


def test_looking_deletes_nothing_though_it_is_over_the_cap(tmp_path):
    tier = opened(tmp_path)
    tier.put(capture((FULL,), range(30)))
    written(tier)
    tier.close()
    before = files(tmp_path)
    tier.store.cap = 10
    tier.mount(collect=False)
    tier.close()
    assert files(tmp_path) == before
    tier.mount()
    tier.close()
    assert files(tmp_path) == []
