"""What every tier promises. A new option is picked up from stages/tiers and must be given a maker."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stages.tiers
from pipeline.types import Attachment, State, Tier
from stages.rows.state import check, state_bytes
from stages.tiers.disk import Disk
from stages.tiers.ram import Ram
from tests.truth import FULL, MIXES, assert_true, capture

PLENTY = 1 << 30


class Nothing:
    """Stands for a model and a KV policy, where a tier only asks how large a segment is."""

    def bytes_per_token(self, target: Any) -> float:
        return 1.0


class Passing(Disk):
    """A disk tier in a folder of its own that goes with it."""

    def __init__(self, cap: int):
        super().__init__(Nothing(), Nothing(), path=tempfile.mkdtemp(), reserve_gb=0.0,
                         segment_tokens=8, max_gb=cap / 1e9)  # fmt: skip

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.root, ignore_errors=True)


MAKERS: dict[str, Callable[[int], Any]] = {
    "ram": lambda cap: Ram(max_gb=cap / 1e9, entry_bytes=0),
    "disk": Passing,
}
MEMORY = pytest.mark.parametrize("make", ["ram"], indirect=True)  # what is exact to the byte
NOT_OPTIONS = {"__init__", "radix", "sessions"}


def note(namespace: str, size: int = 4) -> Attachment:
    return Attachment(namespace, "v1", {"size": size}, (mx.zeros((size,)),))


@pytest.fixture(params=sorted(MAKERS))
def make(request):
    opened: list[Tier] = []

    def maker(cap: int = PLENTY) -> Tier:
        tier = MAKERS[request.param](cap)
        tier.open()
        opened.append(tier)
        return tier

    yield maker
    for tier in opened:
        tier.close()
        tier.close()


def found(tier: Tier, tokens, namespace: str = "n", limit: int | None = None) -> State | None:
    """What lookup gives, verified to be true, released."""
    match = tier.lookup(tokens, namespace, len(tokens) if limit is None else limit)
    tier.check_integrity()
    if match is None:
        return None
    assert match.tier == tier.name
    state = match.state
    assert state.tokens == tuple(tokens[: len(state.tokens)])
    assert state.namespace == namespace
    check(state)
    assert_true(state)
    match.release()
    match.release()
    tier.check_integrity()
    return state


def test_every_option_has_a_maker():
    folder = Path(stages.tiers.__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - NOT_OPTIONS == set(MAKERS)


def test_an_empty_tier_misses(make):
    tier = make()
    assert tier.lookup([1, 2, 3], "n", 3) is None
    assert tier.covered([1, 2, 3], "n") == 0
    assert tier.stats()["misses"] == 1
    tier.clear()
    tier.check_integrity()


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_stored_state_is_found_whole_and_true(make, mix):
    tier, tokens = make(), [5, 6, 7, 8, 9, 10, 11, 12]
    assert tier.put(capture(MIXES[mix], tokens))
    state = found(tier, [*tokens, 13, 14])
    assert state is not None
    assert len(state.tokens) == 8
    assert tier.covered(tokens, "n") == 8
    assert tier.covered([*tokens[:3], 0], "n") == 3
    assert tier.stats()["reused_tokens"] == 8


@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("shared", range(13))
def test_every_shared_length_gives_true_state_or_nothing(make, mix, shared):
    tier, tokens = make(), list(range(50, 62))
    tier.put(capture(MIXES[mix], tokens, slack=2))
    state = found(tier, tokens[:shared] + [0] * 6)
    if mix == "full":
        assert len(state.tokens if state else ()) == shared
    if mix in ("hybrid", "recurrent"):
        assert len(state.tokens if state else ()) == (12 if shared == 12 else 0)


def test_limit_bounds_the_match(make):
    tier, tokens = make(), [1, 2, 3, 4]
    tier.put(capture((FULL,), tokens))
    lengths = [len(s.tokens) if (s := found(tier, tokens, limit=n)) else 0 for n in range(-1, 6)]
    assert lengths == [0, 0, 1, 2, 3, 4, 4]


def test_a_chat_grows_by_partial_captures(make):
    """Each turn captures only what the tier lacks; windows and boundaries make it whole."""
    for mix in MIXES.values():
        tier, tokens = make(), []
        for turn in range(5):
            tokens = tokens + [turn * 10 + i for i in range(9)]
            start = min(tier.covered(tokens, "n"), len(tokens) - 1)
            assert start == turn * 9
            assert tier.put(capture(mix, tokens, start=start))
            assert len(found(tier, [*tokens, 0]).tokens) == len(tokens)
        assert tier.stats()["tokens"] == 45


def test_a_shorter_capture_fills_the_windows_of_a_longer_one(make):
    tier, tokens = make(), list(range(30))
    tier.put(capture(MIXES["windows"], tokens))
    assert found(tier, tokens[:20]) is None
    assert tier.covered(tokens[:20], "n") == 19  # held, but not usable there
    tier.put(capture(MIXES["windows"], tokens[:20], start=19))
    assert len(found(tier, tokens[:20]).tokens) == 20
    assert len(found(tier, tokens).tokens) == 30
    assert tier.stats()["tokens"] == 30


@MEMORY
def test_branches_share_their_prefix(make):
    tier, root = make(), list(range(100, 140))
    for branch in range(10):
        tier.put(capture((FULL,), [*root, branch, branch]))
    one = state_bytes(capture((FULL,), [1]))
    assert tier.stats()["tokens"] == 40 + 10 * 2
    assert tier.stats()["bytes"] == one * 60
    for branch in range(10):
        assert len(found(tier, [*root, branch, branch]).tokens) == 42


def test_putting_twice_changes_nothing(make):
    tier = make()
    for mix in MIXES.values():
        tier.clear()
        tier.put(capture(mix, range(20), attachments=(note("d"),)))
        before = {k: v for k, v in tier.stats().items() if k in ("bytes", "tokens", "entries")}
        assert tier.put(capture(mix, range(20), attachments=(note("d"),)))
        assert before.items() <= tier.stats().items()
        tier.check_integrity()


def test_a_partial_state_without_its_base_is_dropped(make):
    tier = make()
    assert not tier.put(capture((FULL,), range(20), start=8))
    tier.put(capture((FULL,), range(6)))
    assert not tier.put(capture((FULL,), range(20), start=8))
    assert tier.stats()["dropped"] == 2
    assert tier.put(capture((FULL,), range(20), start=6))
    assert len(found(tier, range(20)).tokens) == 20


@MEMORY
def test_a_broken_state_is_refused_before_anything_changes(make):
    tier = make()
    bad = capture((FULL,), range(20), start=8)
    with pytest.raises(AssertionError):
        tier.put(State((1, 2), "n", bad.specs, bad.segments))
    tier.check_integrity()
    assert tier.stats()["bytes"] == 0


def test_attachments_match_only_at_their_length(make):
    tier, tokens = make(), list(range(12))
    tier.put(capture((FULL,), tokens, attachments=(note("a"),)))
    assert [a.namespace for a in found(tier, tokens).attachments] == ["a"]
    assert found(tier, tokens[:11]).attachments == ()
    tier.put(capture((FULL,), [*tokens, 50], start=12))
    assert found(tier, [*tokens, 50]).attachments == ()
    assert [a.namespace for a in found(tier, tokens).attachments] == ["a"], "a split keeps it"


def test_another_drafter_adds_its_attachment_and_keeps_the_state(make):
    tier, tokens = make(), list(range(12))
    tier.put(capture((FULL,), tokens, attachments=(note("a"),)))
    tier.put(capture((FULL,), tokens, start=11, attachments=(note("b", 8),)))
    tier.put(capture((FULL,), tokens[:5], start=4, attachments=(note("b"),)))
    assert sorted(a.namespace for a in found(tier, tokens).attachments) == ["a", "b"]
    assert [a.namespace for a in found(tier, tokens[:5]).attachments] == ["b"]
    tier.put(capture((FULL,), tokens, start=11, attachments=(note("b", 2),)))  # newer one wins
    sizes = {a.namespace: a.metadata["size"] for a in found(tier, tokens).attachments}
    assert sizes == {"a": 4, "b": 2}


def test_converted_states_do_not_mix_with_unconverted_ones(make):
    tier, tokens = make(), list(range(30))
    tier.put(capture((FULL,), tokens[:10]))
    assert not tier.put(capture((FULL,), tokens, start=10, min_reuse=20)), (
        "its base is not converted"
    )
    assert tier.put(capture((FULL,), tokens, min_reuse=20))
    got = {n: found(tier, tokens[:n]) for n in (9, 10, 15, 20, 25)}
    assert {n: (len(s.tokens), s.min_reuse) for n, s in got.items()} == {
        9: (9, 0), 10: (10, 0), 15: (10, 0), 20: (20, 20), 25: (25, 20)
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(0, 3), max_size=5)), max_size=8)
)
def test_namespaces_never_mix(pairs):
    for maker in MAKERS.values():
        tier = maker(PLENTY)
        tier.open()
        for namespace, tokens in pairs:
            if tokens:
                tier.put(capture((FULL,), tokens, namespace))
        for namespace, tokens in pairs:
            other = namespace + "'"
            assert tier.lookup(tokens, other, 9) is None
            assert tier.covered(tokens, other) == 0
            if tokens:
                assert found(tier, tokens, namespace).namespace == namespace
        tier.close()


@MEMORY
def test_least_recently_used_goes_first(make):
    one = state_bytes(capture((FULL,), [1]))
    tier = make(30 * one)
    for name in (1, 2, 3):
        tier.put(capture((FULL,), [name] * 10))
    assert found(tier, [1] * 10) is not None  # refreshed by use
    tier.put(capture((FULL,), [4] * 10))
    assert [found(tier, [name] * 10) is not None for name in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]
    assert tier.stats()["evictions"] == 1
    assert tier.stats()["bytes"] == 30 * one


@MEMORY
def test_a_shared_prefix_outlives_its_branches(make):
    one = state_bytes(capture((FULL,), [1]))
    tier = make(30 * one)
    root = [7] * 10
    for branch in range(20):
        assert tier.put(capture((FULL,), [*root, *[branch + 10] * 10]))
        tier.check_integrity()
    lengths = [len(found(tier, [*root, *[branch + 10] * 10]).tokens) for branch in range(20)]
    assert lengths == [10] * 18 + [20, 20]


@MEMORY
def test_a_state_over_the_cap_is_refused_and_evicts_nothing(make):
    one = state_bytes(capture((FULL,), [1]))
    tier = make(20 * one)
    tier.put(capture((FULL,), [1] * 15))
    assert not tier.put(capture((FULL,), [2] * 21))
    assert not tier.put(capture((FULL,), [*[1] * 15, *[2] * 6], start=15)), (
        "it counts with its base"
    )
    assert found(tier, [1] * 15) is not None
    assert (tier.stats()["dropped"], tier.stats()["evictions"]) == (2, 0)
    assert tier.put(capture((FULL,), [2] * 20))
    assert found(tier, [1] * 15) is None


@MEMORY
def test_a_borrowed_state_survives_pressure_and_clear(make):
    one = state_bytes(capture((FULL,), [1]))
    tier = make(20 * one)
    tier.put(capture((FULL,), [1] * 10))
    match = tier.lookup([1] * 10, "n", 10)
    for name in (2, 3):
        assert tier.put(capture((FULL,), [name] * 10))
    assert not tier.put(capture((FULL,), [4] * 11)), "no room beside what is in use"
    assert_true(match.state)
    tier.clear()
    tier.check_integrity()
    assert_true(match.state)
    assert tier.stats()["borrowed_bytes"] == 10 * one
    assert not tier.put(capture((FULL,), [5] * 11)), "borrowed bytes count"
    match.release()
    assert tier.stats()["borrowed_bytes"] == 0
    assert tier.put(capture((FULL,), [5] * 20))
    tier.check_integrity()


@MEMORY
def test_a_borrowed_state_survives_a_split(make):
    tier, tokens = make(), list(range(20))
    tier.put(capture(MIXES["windows"], tokens, slack=20))
    match = tier.lookup(tokens, "n", 15)
    tier.put(capture(MIXES["windows"], [*tokens[:8], 99, 98], start=8))
    assert_true(match.state)
    assert tier.stats()["borrowed_bytes"] > 0
    match.release()
    assert tier.stats()["borrowed_bytes"] == 0
    assert tier.stats()["leases"] == 0
    tier.check_integrity()


def test_statistics_may_be_read_from_another_thread(make):
    tier = make()
    tier.put(capture((FULL,), [1, 2, 3]))
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(dict(tier.stats())))
    thread.start()
    thread.join()
    assert seen[0]["tokens"] == 3
    wanted = (
        "entries tokens bytes memory_bytes hits misses reused_tokens evictions dropped cap_bytes"
    )
    assert set(wanted.split()) <= set(seen[0])


def test_arrays_given_out_may_cross_threads(make):
    """Whole segments are evaluated; a lazy one would raise in the other thread."""
    tier = make()
    tier.put(capture(MIXES["windows"], range(20)))
    tier.put(capture(MIXES["windows"], [*range(10), 99], start=9))
    match = tier.lookup(range(20), "n", 20)
    errors: list[Exception] = []

    def read() -> None:
        try:
            for segment in match.state.segments:
                mx.eval([dict(piece.arrays) for piece in segment.layers])
                [memoryview(a) for p in segment.layers for a in p.arrays.values()]
        except Exception as error:  # reported below, on the test's own thread
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    match.release()
    assert errors == []
