"""Lookup drafting against a plain search of the whole history."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.drafters.ngram import NGram, NGramRow


def searched(text, low, high, depth, growth):
    """The longest suffix of `text` that ended earlier, at its latest end, and what followed."""
    for size in range(high, low - 1, -1):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if size <= len(text) and ends:
            end = ends[-1]
            agree = 0
            while agree < end and text[end - 1 - agree] == text[-1 - agree]:
                agree += 1
            return text[end : end + min(depth, growth * agree)]
    return []


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60)),
    low=st.integers(1, 3),
    extra=st.integers(0, 4),
    depth=st.integers(1, 12),
    growth=st.sampled_from([1, 2, 100]),
)
def test_proposal_is_what_a_search_finds(text, cuts, low, extra, depth, growth):
    row = NGramRow(low, low + extra, growth)
    borders = [0, *sorted(c for c in cuts if c < len(text) - 1), len(text) - 1]
    for start, end in pairwise(borders):
        row.extend(text[start:end])
        row.check_integrity()
    proposal = row.propose(text[-1], depth)
    assert proposal == searched(text, low, low + extra, depth, growth)
    assert row.propose(text[-1], depth) == proposal  # drafting changes nothing


def test_latest_occurrence_wins():
    row = NGramRow(2, 2, 100)
    row.extend([1, 2, 7, 1, 2, 8, 5, 1])
    assert row.propose(2, 2) == [8, 5]


def test_longest_suffix_wins_over_a_later_shorter_one():
    row = NGramRow(1, 3, 100)
    row.extend([4, 1, 2, 7, 9, 2, 8, 4, 1])
    assert row.propose(2, 1) == [7]


def test_the_suffix_does_not_find_itself():
    row = NGramRow(1, 3, 100)
    row.extend([1, 2, 3])
    assert row.propose(4, 8) == []


def test_a_proposal_runs_into_the_pending_token_and_no_further():
    row = NGramRow(1, 3, 100)
    row.extend([5, 6])
    assert row.propose(5, 8) == [6, 5]


def test_a_copy_doubles_its_proposals_and_a_chance_match_stays_short():
    source = list(range(100, 160))
    row = NGramRow(3, 5, 1)
    row.extend([*source, 7, *source[:2]])
    sizes, at = [], 2
    while at < 40:
        proposal = row.propose(source[at], 16)
        assert proposal == source[at + 1 : at + 1 + len(proposal)]
        row.extend([source[at], *proposal])
        sizes.append(len(proposal))
        at += 1 + len(proposal)
    assert sizes == [3, 7, 15, 16]


@pytest.mark.parametrize(
    ("bad", "where"),
    [({"min_ngram": 0}, "min_ngram"), ({"min_ngram": 4, "max_ngram": 3}, "min_ngram"),
     ({"growth": -1}, "growth")],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(bad, where):
    with pytest.raises(ValueError, match=f"^{where}: "):
        NGram(**bad)


def test_namespace_tells_settings_apart():
    assert len({NGram().namespace, NGram(max_ngram=6).namespace, NGram(growth=0).namespace}) == 3


TEXT = [1, 2, 7, 7, 0, 1, 2, 8, 8, 0, 1, 2, 8, 9, 0, 1]


@pytest.mark.parametrize(
    ("choice", "expected"), [("latest", [8, 9, 0]), ("first", [7, 7, 0]), ("majority", [8, 9, 0])]
)
def test_which_of_several_places_is_copied(choice, expected):
    row = NGramRow(2, 2, 100, choice)
    row.extend(TEXT)
    row.check_integrity()
    assert row.propose(2, 3) == expected


def test_a_majority_goes_on_while_half_of_the_places_agree():
    row = NGramRow(1, 1, 100, "majority")
    row.extend([5, 1, 4, 5, 1, 4, 5, 2, 4, 5, 3, 4])
    assert row.propose(5, 4) == [1, 4, 5, 2]  # two of four, both, both, the latest of two
    row.extend([5, 6, 4])
    assert row.propose(5, 4) == []  # two of five are no half
    assert NGram(choice="first").namespace != NGram().namespace
