"""What the memory tier does for sessions, for its keeper and for a budget."""

from __future__ import annotations

import pytest

from stages.rows.state import state_bytes
from stages.tiers import sessions
from stages.tiers.ram import Ram
from tests.truth import FULL, MIXES, assert_true, capture

ONE = state_bytes(capture((FULL,), [1]))


def small(states: int, length: int = 10) -> Ram:
    return Ram(max_gb=states * length * ONE / 1e9, entry_bytes=0)


class Watching:
    """Remembers what was stored and what went, with its state."""

    def __init__(self) -> None:
        self.stored_keys, self.gone = [], []

    def stored(self, namespace, key):
        self.stored_keys.append(key)

    def leaving(self, namespace, key, make):
        self.gone.append(make())


def test_states_of_sessions_go_last_and_the_longest_silent_of_them_first():
    tier = small(4)
    for name in (1, 2):
        tier.put(capture((FULL,), [name] * 10))
        tier.keep(f"s{name}", [name] * 10, "n")
    for name in range(3, 9):
        assert tier.put(capture((FULL,), [name] * 10))
        tier.check_integrity()
    assert [tier.covered([n] * 10, "n") for n in (1, 2, 5, 6, 7, 8)] == [10, 10, 0, 0, 10, 10]
    assert tier.put(capture((FULL,), [9] * 30)), "sessions keep nobody out"
    assert [tier.covered([n] * 10, "n") for n in (1, 2)] == [0, 10]
    tier.check_integrity()
    assert tier.stats()["sessions"] == 1


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_session_goes_on_from_its_last_state(mix):
    tier, specs = Ram(max_gb=1), MIXES[mix]
    tokens = list(range(20))
    tier.put(capture(specs, tokens))
    tier.keep("s", tokens, "n")
    match = tier.recall("s", [*tokens, 5], "n", 20)
    assert_true(match.state)
    assert match.state.tokens == tuple(tokens)
    match.release()
    for other in ([*tokens[:19], 7, 7], tokens[:19]):
        assert tier.recall("s", other, "n", len(other)) is None, "not its beginning"
    assert tier.recall("s", tokens, "n", 19) is None, "over the limit"
    assert tier.recall("t", tokens, "n", 20) is None
    assert tier.recall("s", tokens, "another", 20) is None
    tier.put(capture(specs, [*tokens[:8], 90, 91]))  # divides what the session holds
    assert tier.recall("s", tokens, "n", 20) is not None
    tier.forget("s")
    assert tier.recall("s", tokens, "n", 20) is None
    assert tier.covered(tokens, "n") == 20, "closed, but not lost"
    tier.check_integrity()


def test_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(sessions, "MOST", 3)
    tier = Ram(max_gb=1)
    for name in range(8):
        tier.put(capture((FULL,), [name] * 4))
        tier.keep(f"s{name}", [name] * 4, "n")
        tier.check_integrity()
    assert tier.stats()["sessions"] == 3
    assert tier.recall("s7", [7] * 5, "n", 4) is not None
    assert tier.recall("s1", [1] * 5, "n", 4) is None
    for name in range(100):
        tier.forget(f"x{name % 50}")
        tier.forget("s7")
    assert len(tier._sessions._closed) == 1, "nor does closing what is not known fill the memory"
    assert tier.recall("s7", [7] * 5, "n", 4) is None
    tier.check_integrity()


def test_the_keepers_look_is_no_use():
    tier = small(3)
    for name in (1, 2, 3):
        tier.put(capture((FULL,), [name] * 10))
    match = tier.borrow([1] * 10, "n")
    assert_true(match.state)
    assert tier.stats()["leases"] == 1
    match.release()
    assert tier.borrow([1] * 9 + [5], "n") is None
    assert (tier.stats()["hits"], tier.stats()["misses"]) == (0, 0)
    tier.put(capture((FULL,), [4] * 10))
    assert tier.covered([1] * 10, "n") == 0, "it was the oldest still"


def test_what_nobody_uses_is_let_go_one_by_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("stages.tiers.ram.time.monotonic", lambda: now[0])
    tier, keeper = Ram(max_gb=1), Watching()
    tier.watch(keeper)
    assert tier.demote(30) is None
    tier.put(capture((FULL,), [1] * 10))
    now[0] += 10
    tier.put(capture((FULL,), [2] * 10))
    match = tier.lookup([2] * 10, "n", 10)
    assert tier.demote(30) == 20
    now[0] += 25
    assert tier.demote(30) == 0.0
    assert [state.tokens for state in keeper.gone] == [(1,) * 10]
    now[0] += 90
    assert tier.demote(30) is None, "what is in use stays"
    match.release()
    assert tier.demote(30) == 0.0
    assert (tier.stats()["demotions"], tier.stats()["bytes"]) == (2, 0)
    tier.check_integrity()


def test_all_memory_is_counted():
    tier = Ram(max_gb=1, entry_bytes=100)
    tier.put(capture((FULL,), [1] * 10))
    assert tier.stats()["memory_bytes"] == 10 * ONE + 100
    match = tier.lookup([1] * 10, "n", 10)
    tier.clear()
    assert tier.stats()["memory_bytes"] == 10 * ONE, "borrowed"
    match.release()
    assert tier.stats()["memory_bytes"] == 0
    assert tier.shrink(50) == 50
