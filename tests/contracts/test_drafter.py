"""What every drafter's rows promise: they follow the target's rows exactly, and only propose."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from stages.drafters.ngram import NGram
from stages.drafters.suffix import Suffix

GROUP = "drafter"
TOYS = {"order": [NGram(min_ngram=4), Suffix()]}
TEXT = [3, 4, 5, 6, 7, 1, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6]
TARGET = SimpleNamespace(vocab_size=32, eos_ids=frozenset({31}), context_len=512)


@pytest.fixture
def rows(option):
    drafter = option()
    drafter.open()
    rows = drafter.rows(TARGET, 9)
    yield rows
    rows.close()
    rows.close()
    drafter.close()


def append(rows, *tokens):
    change = rows.prepare_append([list(t) for t in tokens], [None] * len(tokens))
    change.commit()
    change.dispose()


def draft(rows, pending, depth=8):
    return rows.draft([pending] * rows.size, [depth] * rows.size, [None] * rows.size)


def test_identity_is_known_before_anything_is_opened(option):
    drafter = option()
    assert drafter.prefill in ("tail", "full")
    assert json.dumps(drafter.namespace)
    assert option().namespace == drafter.namespace


def test_proposals_keep_to_each_rows_depth_and_are_deterministic(rows):
    append(rows, TEXT, TEXT, TEXT)
    depths = [0, 2, 8]
    proposals = rows.draft([7, 7, 7], depths, [None] * 3)
    assert [len(p) <= d for p, d in zip(proposals, depths, strict=True)] == [True] * 3
    assert rows.draft([7, 7, 7], depths, [None] * 3) == proposals
    assert all(0 <= token < 32 for p in proposals for token in p)


def test_prefill_in_chunks_equals_joining_with_the_tokens(rows):
    append(rows, [], TEXT)
    for start in range(0, len(TEXT), 5):
        rows.prefill([TEXT[start : start + 5], []])
    rows.check_integrity()
    first, second = draft(rows, 7)
    assert first == second


def test_rejected_drafts_leave_no_trace(rows):
    """A row that drafted and lost everything proposes what one that never drafted does."""
    append(rows, TEXT, TEXT)
    rows.draft([7, 7], [8, 0], [None] * 2)
    rows.commit([[7], [7]])
    rows.check_integrity()
    first, second = draft(rows, 1)
    assert first == second


def test_kept_drafts_are_taken_once(rows):
    append(rows, TEXT, [*TEXT, 7, 2, 3])
    rows.draft([7, 0], [8, 0], [None] * 2)
    rows.commit([[7, 2, 3], []])
    rows.check_integrity()
    first, second = draft(rows, 4)
    assert first == second


def test_consume_follows_rounds_without_a_draft(rows):
    append(rows, TEXT, [*TEXT, 7, 2])
    rows.consume([[7], []])
    rows.consume([[2], []])
    assert draft(rows, 3)[0] == draft(rows, 3)[1]


def test_filter_reorders_and_empties(rows):
    append(rows, TEXT, [1, 2], TEXT[:8])
    expected = [draft(rows, 5)[i] for i in (2, 0)]
    rows.filter([2, 0])
    assert rows.size == 2
    assert draft(rows, 5) == expected
    rows.filter([])
    assert rows.size == 0
    append(rows, TEXT)
    assert rows.size == 1
    rows.check_integrity()


def test_a_disposed_change_changes_nothing(rows):
    append(rows, TEXT)
    before = draft(rows, 7)
    change = rows.prepare_append([[1, 2, 3]], [None])
    assert rows.size == 1
    change.dispose()
    assert rows.size == 1
    assert draft(rows, 7) == before


def test_a_captured_row_comes_back_the_same(rows):
    append(rows, TEXT)
    attachment = rows.capture(0)
    change = rows.prepare_append([TEXT], [attachment])
    change.commit()
    change.dispose()
    assert draft(rows, 7)[0] == draft(rows, 7)[1]
