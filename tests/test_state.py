"""State functions against states whose arrays tell which tokens they belong to."""

from __future__ import annotations

import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.types import Attachment, LayerSlice, Segment, State
from stages.rows import state as states
from tests.truth import FULL, HYBRID, MIXES, assert_true, capture, kv, window

TOKENS = list(range(100, 140))
NOTE = Attachment("drafter", "v1", {}, (mx.zeros((2, 2)),))


def brute_usable(state: State, limit: int) -> int:
    """The definition, token by token."""
    held: list[set[int]] = [set() for _ in state.specs]
    for segment in state.segments:
        for layer, piece in enumerate(segment.layers):
            held[layer] |= set(range(piece.first, segment.stop)) if piece else set()
    exact = states.exact_layers(state)
    for length in range(min(limit, len(state.tokens)), 0, -1):
        needs = [
            (not exact or length in state.boundaries) if layer in exact
            else set(range(states.since(spec, length), length)) <= held[layer]
            for layer, spec in enumerate(state.specs)
        ]  # fmt: skip
        if all(needs):
            return length if length >= state.min_reuse else 0
    return 0


cuts_strategy = st.lists(st.integers(1, 39), max_size=4, unique=True).map(sorted)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MIXES)), cuts_strategy, st.integers(0, 6), st.integers(0, 42))
def test_usable_length_equals_the_definition_and_the_cut_is_true(mix, cuts, slack, limit):
    state = capture(MIXES[mix], TOKENS, cuts=cuts, slack=slack)
    states.check(state)
    usable = states.state_usable(state, limit)
    assert usable == brute_usable(state, limit)
    if usable:
        short = states.cut(state, usable)
        assert short.tokens == tuple(TOKENS[:usable])
        states.check(short)
        assert_true(short)
        assert states.state_usable(short, 99) == usable


def test_a_window_that_has_passed_gives_zero_not_a_slice():
    state = capture((window(12), FULL), TOKENS)  # B01: the window holds 29..39 only
    assert states.state_usable(state, 40) == 40
    assert [states.state_usable(state, limit) for limit in (4, 12, 39)] == [0, 0, 0]
    with pytest.raises(AssertionError, match="cannot cut 40 tokens to 4: usable are 0"):
        states.cut(state, 4)


def test_slack_makes_shorter_lengths_usable():
    state = capture((window(12), FULL), TOKENS, slack=3)
    assert [states.state_usable(state, limit) for limit in (36, 37, 38)] == [0, 37, 38]


def test_holes_between_segments_are_jumped_over():
    # Gemma 3's shape: captures at 10, 25 and 40 leave holes in the windowed layers
    state = capture((window(4), FULL), TOKENS, cuts=[10, 25])
    assert [states.state_usable(state, limit) for limit in range(8, 42, 3)] == [
        0, 10, 10, 10, 10, 10, 25, 25, 25, 25, 25, 40
    ]  # fmt: skip


def test_a_late_payload_covers_earlier_segments():
    base = capture((window(8), FULL), TOKENS[:20])
    tail = capture((window(8), FULL), TOKENS, start=38)
    middle = capture((FULL, FULL), TOKENS[:38], start=20).segments[0]
    middle = replace(middle, layers=(LayerSlice(38, {}), middle.layers[1]))
    state = replace(tail, segments=(*base.segments, middle, *tail.segments))
    states.check(state)
    assert states.held_from(state.segments, 0, 40) == 33
    assert states.state_usable(state, 40) == 40
    assert_true(state)
    assert states.state_usable(state, 39) == 20


@pytest.mark.parametrize(("early", "late"), [(2, 15), (15, 2), (9, 9)])
def test_the_slice_that_reaches_furthest_back_is_taken(early, late):
    def slices(first: int, stop: int) -> tuple[LayerSlice, ...]:
        arrays = {n: mx.array(kv(0, n, TOKENS, first, stop)) for n in ("keys", "values")}
        return (LayerSlice(first, arrays),)

    both = Segment(0, 20, slices(early, 20)), Segment(20, 22, slices(late, 22))
    best = states.longest(both, 0, 20)
    assert (best.first, best.arrays["keys"].shape[1]) == (min(early, late), 20 - min(early, late))
    assert states.longest(both, 0, 22).first == late
    state = State(tuple(TOKENS[:22]), "n", (window(6),), both)
    assert_true(states.cut(state, 20))


def test_materialize_shares_no_buffer():
    array = mx.zeros((1, 64, 16))  # one head and little slack: mx.contiguous would share
    mx.eval(array)
    start = mx.get_active_memory()
    view = states.view(LayerSlice(0, {"keys": array}), 0, 16)
    mine = states.materialize(Segment(0, 16, (view, None)))
    del array, view
    assert start - mx.get_active_memory() > 40 * 16 * 4
    assert mine.layers[0].arrays["keys"].shape == (1, 16, 16)


def test_exact_layers_only_at_their_boundaries():
    state = capture((FULL, HYBRID), TOKENS, cuts=[16, 32])
    assert [states.state_usable(state, limit) for limit in (15, 16, 31, 33, 39, 40)] == [
        0, 16, 16, 32, 32, 40
    ]  # fmt: skip
    short = states.cut(state, 32)
    assert set(short.boundaries) == {16, 32}
    assert_true(short)


def test_attachments_survive_only_at_the_exact_length():
    state = capture((FULL,), TOKENS, attachments=(NOTE,))
    assert states.cut(state, 40).attachments == (NOTE,)
    assert states.cut(state, 39).attachments == ()


def test_a_converted_state_is_not_cut_below_its_conversion():
    state = capture((FULL,), TOKENS, min_reuse=20)
    assert [states.state_usable(state, limit) for limit in (19, 20, 30)] == [0, 20, 30]


def test_partial_states_are_not_usable_alone_and_join_their_base():
    base, tail = capture(MIXES["windows"], TOKENS[:30]), capture(MIXES["windows"], TOKENS, start=24)
    assert states.state_usable(tail, 40) == 0
    states.check(tail)
    whole = states.join(base, tail)
    states.check(whole)
    assert_true(whole)
    assert [segment.start for segment in whole.segments] == [0, 24]


@pytest.mark.parametrize("other", [{"namespace": "m"}, {"tokens": (1, *TOKENS[1:])}])
def test_states_that_do_not_continue_each_other_are_not_joined(other):
    base, tail = capture((FULL,), TOKENS[:30]), capture((FULL,), TOKENS, start=30)
    with pytest.raises(AssertionError):
        states.join(base, replace(tail, **other))


def test_layer_range_gives_any_range_and_names_a_hole():
    state = capture((window(4), FULL), TOKENS, cuts=[10, 25])
    for first, stop in [(0, 40), (5, 30), (10, 25), (24, 26), (7, 7)]:
        arrays = states.layer_range(state, 1, first, stop)
        if first == stop:
            assert arrays == {}
        else:
            np.testing.assert_array_equal(
                np.array(arrays["keys"]), kv(1, "keys", TOKENS, first, stop)
            )
    whole = states.layer_range(state, 1, 10, 25)["keys"]
    assert whole is state.segments[1].layers[1].arrays["keys"], "a fitting slice is not copied"
    with pytest.raises(AssertionError, match=r"layer 0 lacks tokens \[15, 22\) of \[15, 25\)"):
        states.layer_range(state, 0, 15, 25)


@pytest.mark.parametrize("at", [1, 17, 30, 38, 39])
def test_split_gives_the_same_arrays(at):
    state = capture(MIXES["windows"], TOKENS)
    left, right = states.split(state.segments[0], at)
    assert (left.start, left.stop, right.start, right.stop) == (0, at, at, 40)
    both = replace(state, segments=(left, right))
    states.check(both)
    assert_true(both)
    assert states.nbytes(left) + states.nbytes(right) == states.nbytes(state.segments[0])


@pytest.mark.parametrize("heads", [1, 2])
def test_split_halves_do_not_pin_the_whole(heads):
    array = mx.zeros((heads, 1 << 10, 16))
    mx.eval(array)
    segment = Segment(0, 1 << 10, (LayerSlice(0, {"keys": array}),))
    whole, start = array.nbytes, mx.get_active_memory()
    left, right = states.split(segment, 8)
    del array, segment, right
    freed = start - mx.get_active_memory()
    assert freed > whole - states.nbytes(left) - 4096


def test_split_halves_are_evaluated():
    left, right = states.split(capture((FULL,), TOKENS).segments[0], 11)
    sums: list[float] = []

    def read() -> None:  # a lazy array of another thread raises here
        sums.extend(float(np.array(half.layers[0].arrays["keys"]).sum()) for half in (left, right))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert sum(sums) == pytest.approx(float(kv(0, "keys", TOKENS, 0, 40).sum()))


def test_bytes_count_everything():
    state = capture(MIXES["everything"], TOKENS, attachments=(NOTE,))
    full, windowed, recurrent = 40 * 2 * 2 * 3 * 4, 4 * 2 * 2 * 3 * 4, 4
    assert states.nbytes(state.segments[0]) == full + windowed
    assert states.state_bytes(state) == full + windowed + recurrent + 16


def broken(**changes) -> State:
    return replace(capture((FULL, window(4)), TOKENS, cuts=[10]), **changes)


HALF = capture((FULL, window(4)), TOKENS, cuts=[10]).segments


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (broken(tokens=tuple(TOKENS[:39])), "39 tokens, segments end at 40"),
        (broken(segments=()), "without segments"),
        (broken(segments=HALF[::-1]), "segment"),
        (broken(segments=(HALF[0], replace(HALF[1], start=11))), "after 10"),
        (broken(segments=(HALF[0], replace(HALF[1], layers=HALF[1].layers[:1]))), "1 layers for 2"),
        (broken(segments=(HALF[0], replace(HALF[1], layers=HALF[0].layers))), "layer 0"),
        (broken(segments=(HALF[0], replace(HALF[1], layers=HALF[1].layers[::-1]))), "begins at 37"),
        (broken(boundaries={10: {0: 1}}), "boundary 10"),
        (
            replace(capture((FULL, HYBRID), TOKENS), boundaries={}),
            r"layers \[1\] have no payload at 40",
        ),
    ],
)
def test_check_names_what_is_wrong(state, message):
    with pytest.raises(AssertionError, match=message):
        states.check(state)
