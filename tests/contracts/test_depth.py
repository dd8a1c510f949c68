"""What every depth option promises: 0..max, within the row's budget."""

from __future__ import annotations

import pytest

from pipeline.types import Batch, Request, Sequence

GROUP = "depth"


def row(max_new, done=0, **fields):
    return Sequence(
        Request(id="r"), print, prompt_ids=[1], output_ids=[2] * done, max_new=max_new, **fields
    )


@pytest.fixture
def depth(option):
    part = option()
    part.open()
    yield part
    part.close()


def test_a_row_with_room_gets_up_to_max_and_all_rows_an_answer(depth):
    chosen = depth.choose(Batch([row(1000), row(1000, 5)], None, None))
    assert len(chosen) == 2
    assert all(0 <= n <= depth.max for n in chosen)


@pytest.mark.parametrize("left", range(4))
def test_no_draft_past_the_budget(depth, left):
    assert depth.choose(Batch([row(10, 10 - left)], None, None))[0] <= max(0, left - 1)


def test_rows_that_are_not_live_draft_nothing(depth):
    ended = [row(99, finish_reason="stop"), row(99, cancelled=True), row(99, error=ValueError())]
    assert depth.choose(Batch(ended, None, None)) == [0, 0, 0]


def test_observing_a_round_never_fails(depth):
    depth.observe(Batch([row(9)], None, None), 0.01)
