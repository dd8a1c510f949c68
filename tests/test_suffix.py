"""The suffix tree against a plain search of the whole history."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from stages.drafters.suffix import Suffix, SuffixRow
from stages.drafters.suffix_tree import SuffixTree


def longest(text, at_least=1):
    """Length of the longest suffix of `text` that also ends earlier, and all such ends."""
    for size in range(len(text) - 1, at_least - 1, -1):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if ends:
            return size, ends
    return 0, []


def unrolled(text, end, count):
    """`count` tokens from `end` on, of the text that goes on with itself."""
    out = list(text)
    for _ in range(count):
        out.append(out[end + len(out) - len(text)])
    return out[len(text) :]


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60)),
    least=st.integers(1, 4),
    depth=st.integers(1, 12),
    growth=st.sampled_from([0.5, 1.0, 2.0, 100.0]),
)
def test_proposal_is_what_a_search_finds(text, cuts, least, depth, growth):
    row = SuffixRow(least, growth)
    borders = [0, *sorted(c for c in cuts if c < len(text) - 1), len(text) - 1]
    for start, end in pairwise(borders):
        row.extend(text[start:end])
    row.check_integrity()
    proposal = row.propose(text[-1], depth)
    size, ends = longest(text, least)
    assert len(proposal) == (min(depth, max(1, int(growth * size))) if size else 0)
    for index in range(len(proposal)):  # each token followed the tokens before it at some match
        context = text[-size:] + proposal[:index]
        whole = text + proposal[:index]
        followed = {
            whole[e]
            for e in range(len(context), len(whole))
            if whole[e - len(context) : e] == context
        }
        assert proposal[index] in followed
    if len(ends) == 1:
        assert proposal == unrolled(text, ends[0], len(proposal))
    assert row.propose(text[-1], depth) == proposal  # drafting changes nothing
    row.check_integrity()


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.integers(0, 2), max_size=50))
def test_the_tree_knows_the_longest_repeated_suffix_after_each_token(text):
    tree = SuffixTree()
    for index, token in enumerate(text):
        tree.extend([token])
        assert tree.end.length == longest(text[: index + 1])[0]


def test_the_latest_of_equal_matches_wins():
    row = SuffixRow(2, 10.0)
    row.extend([1, 2, 7, 7, 1, 2, 8, 8, 5, 1])
    assert row.propose(2, 2) == [8, 8]


def test_the_longest_match_wins_over_a_later_shorter_one():
    row = SuffixRow(1, 10.0)
    row.extend([9, 4, 1, 2, 7, 3, 2, 8, 4, 1])
    assert row.propose(2, 1) == [7]


def test_a_period_goes_on():
    row = SuffixRow(1, 10.0)
    row.extend([5, 6, 5, 6, 5])
    assert row.propose(6, 7) == [5, 6, 5, 6, 5, 6, 5]


def test_tokens_of_any_size():
    row = SuffixRow(2, 10.0)
    row.extend([2**31 - 1, 0, 262143, 17, 2**31 - 1])
    assert row.propose(0, 2) == [262143, 17]


@pytest.mark.parametrize("wrong", [{"min_match": 0}, {"growth": 0.0}, {"growth": float("inf")}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises((ValueError, ConfigError), match=next(iter(wrong))):
        Suffix(**wrong)


def test_lookups_stay_quick_in_a_long_history():
    """The bench measures it alone; here a bound that only a scan or a leak would break."""
    draw = random.Random(0)
    prose = [draw.randrange(50) if draw.random() < 0.7 else 60 for _ in range(30_000)]
    row = SuffixRow(3, 1.0)
    row.extend(prose)
    start = time.perf_counter()
    for token in prose[:2000]:
        row.propose(token, 8)
        row.extend([token])
    assert (time.perf_counter() - start) / 2000 < 500e-6
    assert row.tree.nbytes / len(row.tree.text) < 300
