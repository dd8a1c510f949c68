"""The ram tier's tree against a model that keeps everything as sets of token prefixes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.types import LayerSpec, State
from stages.rows.state import check, exact_layers, since, state_bytes
from stages.tiers.radix import WORD, common, pack
from stages.tiers.ram import Ram
from tests.truth import FULL, MIXES, assert_true, capture


class Brute:
    """All tokens ever put, by layer and whole prefix: what an ideal tier could still use."""

    def __init__(self, specs: tuple[LayerSpec, ...]) -> None:
        self.specs = specs
        self.held: list[set[tuple[int, ...]]] = [set() for _ in specs]
        self.tokens: set[tuple[int, ...]] = set()

    def put(self, state: State) -> None:
        tokens = state.tokens
        self.tokens |= {tokens[:n] for n in range(1, len(tokens) + 1)}
        for segment in state.segments:
            for layer, piece in enumerate(segment.layers):
                if piece is not None:
                    self.held[layer] |= {tokens[: p + 1] for p in range(piece.first, segment.stop)}
        for layer in exact_layers(state):
            self.held[layer] |= {tokens[:at] for at in state.boundaries}

    def covered(self, tokens: tuple[int, ...]) -> int:
        return max((n for n in range(len(tokens) + 1) if tokens[:n] in self.tokens), default=0)

    def usable(self, tokens: tuple[int, ...], limit: int) -> int:
        for length in range(min(limit, self.covered(tokens)), 0, -1):
            if all(self._has(layer, tokens, length) for layer in range(len(self.specs))):
                return length
        return 0

    def _has(self, layer: int, tokens: tuple[int, ...], length: int) -> bool:
        spec = self.specs[layer]
        if spec.kind == "recurrent":
            return tokens[:length] in self.held[layer]
        return all(tokens[: p + 1] in self.held[layer] for p in range(since(spec, length), length))


few = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
puts = st.lists(st.tuples(few, st.integers(0, 14), st.integers(0, 4), st.booleans()), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(MIXES)), puts, st.lists(st.tuples(few, st.integers(0, 15)), max_size=6)
)
def test_lookup_finds_the_longest_usable_prefix_of_everything_put(mix, states, queries):
    specs = MIXES[mix]
    tier, brute = Ram(max_gb=1), Brute(specs)
    for tokens, cut, slack, partial in states:
        start = min(brute.covered(tokens), len(tokens) - 1) if partial else 0
        cuts = [cut] if start < cut < len(tokens) else []
        state = capture(specs, tokens, start=start, cuts=cuts, slack=slack)
        check(state)
        assert tier.put(state)
        brute.put(state)
        tier.check_integrity()
        assert tier.covered(tokens, "n") == len(tokens), "it is usable at its own length"
    assert tier.stats()["tokens"] == len(brute.tokens)
    for tokens, limit in queries:
        whole = brute.usable(tokens, len(tokens)) == len(tokens)
        assert tier.covered(tokens, "n") == min(brute.covered(tokens), len(tokens) - (not whole))
        match = tier.lookup(tokens, "n", limit)
        assert (len(match.state.tokens) if match else 0) == brute.usable(tokens, limit)
        if match:
            check(match.state)
            assert_true(match.state)
            match.release()
    tier.check_integrity()


@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize("seed", range(4))
def test_random_life_under_a_small_cap(mix, seed):
    """Puts, lookups, leases and clears: true arrays, exact accounting, never over the cap."""
    specs, rng = MIXES[mix], random.Random(f"{mix} {seed}")
    cap = 60 * max(1, state_bytes(capture(specs, range(40))) // 40)
    tier, leases = Ram(max_gb=cap / 1e9, entry_bytes=0), []
    for _ in range(150):
        name = rng.choice("abc")
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        act = rng.random()
        if act < 0.55:
            start = min(tier.covered(tokens, name), len(tokens) - 1)
            stored = tier.put(capture(specs, tokens, name, start=start, slack=rng.randrange(4)))
            assert not stored or tier.covered(tokens, name) == len(tokens)
        elif act < 0.85:
            match = tier.lookup(tokens, name, rng.randrange(len(tokens) + 1))
            leases += [match] if match else []
        elif leases:
            match = leases.pop(rng.randrange(len(leases)))
            assert_true(match.state)
            match.release()
        elif act > 0.98:
            tier.clear()
        tier.check_integrity()
        stats = tier.stats()
        assert stats["bytes"] <= cap
        assert stats["leases"] == len(leases)
    for match in leases:
        assert_true(match.state)
        match.release()
    tier.check_integrity()
    assert tier.stats()["borrowed_bytes"] == 0
    assert tier.stats()["evictions"] > 0
    tier.close()
    assert (tier.stats()["bytes"], tier.stats()["entries"], tier.stats()["tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("where", ["stages.tiers.radix.evaluate", "stages.rows.state.evaluate"])
def test_no_memory_for_a_copy_is_a_drop(monkeypatch, where):
    """Either the new arrays or the halves of a split cannot be made: the tier stays as it was."""
    tier = Ram(max_gb=1)
    tier.put(capture(MIXES["windows"], range(20)))
    before = tier.stats()["bytes"]

    def fail(segments: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        assert not tier.put(capture(MIXES["windows"], [*range(10), 99]))
    tier.check_integrity()
    assert tier.covered([*range(10), 99], "n") == 10
    assert (tier.stats()["bytes"], tier.stats()["failures"]) == (before, 1)
    assert tier.put(capture(MIXES["windows"], [*range(10), 99]))
    tier.check_integrity()


@given(st.lists(st.integers(0, 2), min_size=1), st.lists(st.integers(0, 2), min_size=1))
def test_common_counts_equal_tokens(edge, key):
    wanted = next((i for i, (a, b) in enumerate(zip(edge, key, strict=False)) if a != b), None)
    wanted = min(len(edge), len(key)) if wanted is None else wanted
    assert common(pack(edge), pack([9, *key]), WORD) == wanted * WORD


def test_tokens_that_differ_in_one_byte_are_different():
    tier = Ram(max_gb=1)
    tier.put(capture((FULL,), [1, 256, 65536, 1]))
    assert tier.covered([1, 256, 65537, 1], "n") == 2
    assert tier.covered([256, 65536, 1], "n") == 0


def test_many_short_chats_evict_in_order():
    """Eviction does not scan: the oldest entry of the order is always one that can go."""
    one = state_bytes(capture((FULL,), [1]))
    tier = Ram(max_gb=100 * one / 1e9, entry_bytes=0)
    for name in range(300):
        assert tier.put(capture((FULL,), [name, name]))
    assert tier.stats()["evictions"] == 250
    assert [tier.covered([name, name], "n") for name in (0, 249, 250, 299)] == [0, 0, 2, 2]


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan")])
def test_a_senseless_cap_is_refused(bad):
    with pytest.raises(ValueError, match="max_gb: wants a number > 0"):
        Ram(max_gb=bad)


def test_states_without_bytes_are_bounded_too():
    tier = Ram(max_gb=20e-6, entry_bytes=1000)
    for first in range(100):
        assert tier.put(capture((), [first, first]))
        tier.check_integrity()
    assert tier.stats()["entries"] == 20
