"""Captures of answers under way on disk: whose they are, when they go, and who does the work."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import time

import pytest
from test_disk_tier import files, found, opened, written

from pipeline.errors import GraphError
from pipeline.types import Attachment
from stages.progress import Progress
from stages.resume import Finding
from stages.tiers.saved import format as form
from tests.truth import FULL, MIXES, assert_true, capture

PROMPT = list(range(20))
ANSWER = [*PROMPT, *range(60, 90)]
SPECS = MIXES["everything"]


@pytest.fixture
def tier(tmp_path):
    tier = opened(tmp_path)
    yield tier
    tier.close()


def noted(attempt, count, specs=SPECS):
    """A capture of `count` tokens with its record."""
    note = Attachment(attempt.label, "record", {"count": count})
    return capture(specs, ANSWER[:count], attachments=(note,))


def take(tier, attempt, count, specs=SPECS):
    assert tier.attempts.take(attempt, noted(attempt, count, specs))
    while tier.attempts.under_way(attempt):
        tier.attempts.step()
        tier.wait(5.0)
    tier.check_integrity()


def left(tier, key="k", tokens=PROMPT):
    """Lengths of what could be gone on from; each is verified to be true."""
    told = []
    for attempt, reading in tier.attempts.left(key, tokens, "n"):
        reading.wait()
        if (match := reading.take()) is None:
            continue
        assert_true(match.state)
        labels = [note.namespace for note in match.state.attachments]
        assert labels in ([attempt.label], [])
        if labels:  # else the record could not be read
            told.append(len(match.state.tokens))
    gc.collect()
    return told


def on_disk(tier):
    """Names of the files, once all that was asked of the I/O thread is done."""
    tier.store.erase_soon([]).result(10.0)
    return {path.stem for path in files(tier.root)}


def kinds(tier):
    return sorted(file.kind for file in tier.store.shelf.files.values())


def test_it_is_there_after_a_restart_for_the_same_key_and_prompt(tmp_path):
    tier = opened(tmp_path)
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
    tier.close()
    tier = opened(tmp_path)
    assert left(tier) == [30]
    assert left(tier, "another") == left(tier, tokens=[1, 2]) == left(tier, tokens=ANSWER) == []
    assert not list(tier.attempts.left("k", PROMPT, "another namespace"))
    match = tier.lookup(ANSWER, "n", 50)
    assert len(match.state.tokens) == 30 and not match.state.attachments, "the record is nobody's"
    tier.close()


def test_only_what_is_new_is_written_and_the_one_before_goes(tier):
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 24)
    before = tier.stats()["written_files"]
    take(tier, attempt, 30)
    written(tier)
    assert tier.stats()["written_files"] - before == 3  # tokens 24 to 30, the boundary, the record
    assert kinds(tier) == ["attachment", "boundary", "run", "run", "run", "run"]
    assert on_disk(tier) == set(tier.store.shelf.files)
    del attempt
    assert left(tier) == [30]


def test_two_at_once_never_meet(tier):
    one, other = tier.attempts.begin("k"), tier.attempts.begin("k")
    take(tier, one, 30)
    take(tier, other, 30)
    assert left(tier) == [], "who is at work keeps what is its own"
    tier.attempts.end(one)
    on_disk(tier)  # nothing is gone on from while something is still to be removed
    del one, other
    gc.collect()
    assert left(tier) == [30], "the boundary that both stood on is still there"


def test_a_complete_answer_leaves_its_runs_only(tier):
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 24)
    take(tier, attempt, 30)
    tier.attempts.end(attempt)
    assert left(tier) == [], "at once"
    on_disk(tier)
    del attempt
    assert left(tier) == []
    assert set(kinds(tier)) == {"run"}
    assert on_disk(tier) == set(tier.store.shelf.files)


def test_what_another_state_needs_stays_when_the_answer_is_complete(tier):
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
    assert tier.put(capture(SPECS, ANSWER[:30])), "nothing of it is new"
    written(tier)
    assert tier.durable(ANSWER[:30], "n")
    tier.attempts.end(attempt)
    on_disk(tier)
    assert tier.durable(ANSWER[:30], "n"), "a flush may have promised it"
    assert left(tier) == [] and not tier.store.shelf.records


def test_a_write_that_comes_late_is_removed(tier, monkeypatch):
    go, write, began = threading.Event(), form.write, threading.Event()

    def slow(file, header, arrays):
        if header.kind == "attachment":
            began.set()
            assert go.wait(10.0)
        return write(file, header, arrays)

    monkeypatch.setattr(form, "write", slow)
    attempt = tier.attempts.begin("k")
    assert tier.attempts.take(attempt, noted(attempt, 30))
    while not began.is_set():
        tier.attempts.step()
        began.wait(0.01)
    tier.attempts.end(attempt)
    go.set()
    written(tier)
    assert on_disk(tier) == set(tier.store.shelf.files)
    assert left(tier) == [] and set(kinds(tier)) == {"run"}


def test_a_cleanup_that_fails_blocks_the_key_until_one_succeeds(tier, monkeypatch):
    attempt, other = tier.attempts.begin("k"), tier.attempts.begin("other")
    take(tier, attempt, 30)
    take(tier, other, 24)
    remove = tier.store.folder.remove
    monkeypatch.setattr(
        tier.store.folder, "remove", lambda name: (_ for _ in ()).throw(OSError("no"))
    )
    tier.attempts.end(attempt)
    tier.store.sync(force=True)  # finds the file that should be gone
    again = tier.attempts.begin("k")
    take(tier, again, 24)
    del attempt, other, again
    assert [left(tier) for _ in range(3)] == [[], [], []]
    assert left(tier, "other") == [24]
    monkeypatch.setattr(tier.store.folder, "remove", remove)
    assert left(tier) == []  # tried again, and waited for
    on_disk(tier)
    tier.store.sync(force=True)
    assert left(tier) == [24], "what is of a later attempt"


def test_a_cleanup_leaves_what_was_kept_again_meanwhile(tier, monkeypatch):
    """Files are named by what they hold: a later attempt's, and a finished state's, have the same names."""
    go, erase = threading.Event(), tier.store._erase
    monkeypatch.setattr(tier.store, "_erase", lambda names: go.wait(10.0) and erase(names))
    first, again = tier.attempts.begin("k"), tier.attempts.begin("k")
    take(tier, first, 30)
    tier.attempts.end(first)
    assert tier.attempts.take(again, noted(again, 30))
    assert tier.put(capture(SPECS, ANSWER[:30]))
    tier.attempts.step()  # its files are written behind the removal that waits
    tier.attempts.end(again)
    go.set()
    written(tier)
    assert on_disk(tier) == set(tier.store.shelf.files)
    assert tier.durable(ANSWER[:30], "n") and found(tier, ANSWER) == 30


def test_a_cleanup_that_fails_is_safe_after_a_restart(tmp_path, monkeypatch):
    """What cannot be removed is emptied: whoever finds it later has a damaged file, a miss."""
    tier = opened(tmp_path)
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
    (record,) = tier.store.shelf.records["k"]
    path = tier.store.folder.path(record)
    with monkeypatch.context() as patch:
        patch.setattr(type(path), "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError("no")))
        tier.attempts.end(attempt)
        tier.store.io.submit(int).result(10.0)
        assert path.exists()
        tier.close()
    tier = opened(tmp_path)
    assert left(tier) == [] and not tier.store.shelf.records and not path.exists()
    tier.close()


def test_a_look_at_the_folder_does_not_bring_back_what_is_being_removed(tier, monkeypatch):
    go, erase = threading.Event(), tier.store._erase
    monkeypatch.setattr(tier.store, "_erase", lambda names: go.wait(10.0) and erase(names))
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
    tier.attempts.end(attempt)
    tier.store.sync(force=True)
    assert not tier.store.shelf.records
    go.set()
    on_disk(tier)
    tier.store.sync(force=True)
    tier.check_integrity()
    assert on_disk(tier) == set(tier.store.shelf.files)


SERVER = """
import sys; sys.path[:0] = [".", "tests"]
from tests.test_attempts import noted, take, left
from tests.test_disk_tier import opened
tier = opened(sys.argv[1])
if sys.argv[2] == "go on":
    attempt, reading = next(tier.attempts.left("k", list(range(20)), "n"))
    reading.wait(); assert reading.take() is not None
else:
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
print("ready", flush=True); sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["from its beginning", "go on"])
def test_what_another_server_works_on_is_not_gone_on_from(tmp_path, how):
    tier = opened(tmp_path)
    if how == "go on":
        take(tier, tier.attempts.begin("k"), 30)
        gc.collect()
        tier.store.io.submit(int).result(10.0)
    command = [sys.executable, "-c", SERVER, str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout.readline() == "ready\n"
        tier.store.sync(force=True)
        assert tier.store.shelf.records["k"], "its record is seen"
        assert left(tier) == []
        it.kill()
    assert left(tier) == [30], "the system knows that nobody does any more"
    tier.close()


def test_a_cleanup_is_never_shed(tmp_path):
    tier = opened(tmp_path, queue_gb=0.0)
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
    tier.attempts.end(attempt)
    for start in range(3):
        tier.put(capture(SPECS, [start + 5] * 30))
    assert tier.stats()["dropped"] > 0
    tier.close()
    tier = opened(tmp_path)
    assert left(tier) == []
    tier.close()


def test_captures_and_other_states_share_one_bound(tmp_path):
    tier = opened(tmp_path, queue_gb=0.0)
    attempt = tier.attempts.begin("k")
    assert tier.attempts.take(attempt, noted(attempt, 30))
    tier.put(capture(SPECS, [5] * 30))
    assert not tier.attempts.under_way(attempt), "given up for a newer one"
    take(tier, attempt, 40)
    del attempt
    assert left(tier) == [40]
    tier.close()


def test_while_rows_decode_the_owner_leaves_the_disk_alone(tier, monkeypatch):
    owner, touched = threading.current_thread(), []
    for name in ("locked", "scan", "begin", "publish", "remove", "discard"):
        method = getattr(tier.store.folder, name)

        def noticed(*args, method=method, name=name):
            touched.append((name, threading.current_thread() is owner))
            return method(*args)

        monkeypatch.setattr(tier.store.folder, name, noticed)
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 24)
    take(tier, attempt, 30)
    tier.attempts.end(attempt)
    tier.wait(5.0)
    on_disk(tier)
    assert {name for name, _ in touched} >= {"begin", "publish", "remove"}
    assert [name for name, mine in touched if mine] == []


def test_no_more_bytes_a_second_than_allowed(tmp_path):
    tier = opened(tmp_path, capture_mb_s=0.1)
    attempt = tier.attempts.begin("k")
    assert tier.attempts.take(attempt, noted(attempt, 30))
    tier.queue.rests_until = time.monotonic() + 1e9
    for _ in range(3):
        tier.attempts.step()
        tier.wait(5.0)
    assert tier.stats()["written_files"] == 0
    tier.queue.rests_until = before = time.monotonic()
    tier.attempts.step()
    tier.wait(5.0)
    written = tier.stats()["written_bytes"]
    assert written > 0 and tier.queue.rests_until >= before + (written - 4096 * 9) / 1e5
    tier.close()


def test_a_damaged_capture_is_a_miss(tier):
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 30)
    record = next(f for f in tier.store.shelf.files.values() if f.kind == "attachment")
    path = tier.store.folder.path(record.name)
    path.write_bytes(path.read_bytes()[:-1] + b"?" * 9)
    del attempt, record
    assert left(tier) == []
    assert found(tier, ANSWER) == 30, "the state itself is as good as any"


def test_what_it_left_before_serves_where_the_last_cannot_be_read(tier, monkeypatch):
    attempt = tier.attempts.begin("k")
    take(tier, attempt, 24)
    assert tier.attempts.take(attempt, noted(attempt, 30))
    written(tier)  # both are there: it ended before anybody looked
    last = max(tier.store.shelf.records["k"].values(), key=lambda file: file.stop)
    del attempt
    read = tier.store.read

    def fails(name):
        if name == last.name:
            raise OSError(errno.EIO, "not just now")
        return read(name)

    monkeypatch.setattr(tier.store, "read", fails)
    finding = Finding(tier.attempts.left("k", PROMPT, "n"))
    finding.reading.wait()
    assert finding.take() is None, "a state without its record is none"
    tier._rests_until = 0.0
    finding.turn()
    finding.reading.wait()
    assert len(finding.take().state.tokens) == 24
    assert len(tier.store.shelf.records["k"]) == 2, "what cannot be read just now stays"


@pytest.mark.parametrize("burst", [1, 9, 17])
def test_no_more_is_lost_than_promised_though_many_come_at_once(burst):
    progress = Progress(None, captured=1, burst=burst)
    for durable in (1, 57, 100):
        progress.captured = durable
        before = progress.due(64) - 1  # so many may be out before the round that captures
        assert before + burst - durable <= 64


@pytest.mark.parametrize(
    ("tiers", "hint"), [("none", "'tier=[disk]'"), ("ram", "'tier=[ram,disk]'")]
)
def test_the_flow_without_a_disk_is_refused(tiers, hint):
    from pipeline.build import build
    from pipeline.compose import compose
    from pipeline.plan import plan

    with pytest.raises(GraphError) as caught:
        build(plan(compose("fake", ["flow=resumable", f"tier={tiers}"])))
    problems = [str(problem) for problem in caught.value.problems]
    assert [p.split(":")[0] for p in problems] == ["stage 'resume'", "stage 'progress_capture'"]
    assert all(f"Choose {hint}." in problem for problem in problems)


def test_full_layers_share_every_token(tier):
    attempt, specs = tier.attempts.begin("k"), (FULL,)
    take(tier, attempt, 24, specs)
    take(tier, attempt, 30, specs)
    assert kinds(tier) == ["attachment", "run", "run", "run", "run"]
    assert tier.stats()["tokens"] == 30
