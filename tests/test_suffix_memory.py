"""What earlier answers said: counted, bounded, kept apart, and never more than a proposal."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import prompt_ids, serving

from pipeline.types import Owner
from stages.drafters.suffix import LEAST, Suffix
from stages.drafters.suffix_memory import BORDER, NAMESPACES, CountedTree, Memories, Memory, Recall

ANSWERS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=6)


def longest(answers, text, least=1):
    """Length of the longest suffix of `text` in any answer, and what followed it how often."""
    for size in range(len(text), least - 1, -1):
        tail = text[-size:]
        ends = [(a, e) for a in answers for e in range(size, len(a) + 1) if a[e - size : e] == tail]
        if ends:
            return size, Counter(a[e] if e < len(a) else None for a, e in ends)
    return 0, Counter()


@settings(max_examples=300, deadline=None)
@given(answers=ANSWERS, text=st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_it_finds_the_longest_and_proposes_the_most_frequent(answers, text):
    memory = Memory(1000)
    recall = Recall(memory)
    for index, answer in enumerate(answers):  # rows look while answers come in
        recall.longest(text[: index + 1], 0, 1)
        memory.learn(answer)
    tree, place = recall.longest(text[:-1], text[-1], 1)
    size, followed = longest(answers, text)
    assert place.length == size
    if size:
        found = tree.following(place, text[-1], 1)
        ends = followed.pop(None, 0)  # each answer's end is its own
        most = max(followed.values(), default=0)
        assert followed[found[0]] == most if found else ends and most <= 1
        assert all(token < 4 for token in tree.following(place, text[-1], 30))


@settings(max_examples=200, deadline=None)
@given(answers=ANSWERS)
def test_counts_are_occurrences(answers):
    tree = CountedTree()
    for answer in answers:
        tree.learn(answer)

    def walk(node, prefix):
        for key, child in tree._edges.items():
            if key >> 32 == node:
                stop = len(tree.text) if tree.stop[child] < 0 else tree.stop[child]
                yield child, prefix + list(tree.text[tree.start[child] : stop])
                yield from walk(child, prefix + list(tree.text[tree.start[child] : stop]))

    for node, string in walk(0, []):
        if all(token < 4 for token in string):
            size = len(string)
            seen = sum(a[i : i + size] == string for a in answers for i in range(len(a) - size + 1))
            assert tree.counts[node] == seen, string


def test_a_proposal_ends_with_the_answer():
    memory = Memory(1000)
    memory.learn([1, 2, 3, 4, 5])
    memory.learn([7, 8])
    tree, place = Recall(memory).longest([1, 2], 3, 3)
    assert tree.following(place, 3, 16) == [4, 5]
    assert not Recall(memory).longest([4, 5], 7, 3)[1].length  # no match over a border


def test_the_oldest_answers_go_and_bytes_are_bounded():
    draw = random.Random(0)
    memory = Memory(2000)
    answers = [[draw.randrange(1000) for _ in range(100)] for _ in range(60)]
    for answer in answers:
        memory.learn(answer)
        assert sum(len(tree.text) for tree in memory.trees) <= 2000
        assert memory.nbytes < 2000 * 300
    known = [bool(Recall(memory).longest(a[:5], a[5], 3)[1].length) for a in answers]
    assert known[-9:] == [True] * 9
    assert not any(known[:40])
    memory.learn(list(range(5000)))  # longer than all it may keep
    assert sum(len(tree.text) for tree in memory.trees) <= 2000


def test_namespaces_are_few_and_do_not_see_each_other():
    memories = Memories(1000)
    memories.of("a").learn([1, 2, 3, 4, 5])
    assert Recall(memories.of("a")).longest([1, 2], 3, 3)[1].length == 3
    assert not Recall(memories.of("b")).longest([1, 2], 3, 3)[1].length
    for index in range(NAMESPACES):
        memories.of(f"other {index}")
    assert not Recall(memories.of("a")).longest([1, 2], 3, 3)[1].length  # used longest ago: gone


def drafts(drafter, namespace, text, pending):
    rows = drafter.rows(None, 9)
    rows.prepare_append([text], [None]).commit()
    rows.assign([Owner(namespace)])
    (proposal,) = rows.draft([pending], [8], [None])
    rows.check_integrity()
    return proposal


def test_rows_draft_from_their_own_namespace_only():
    drafter = Suffix(remember=LEAST)
    drafter.learn("mine", [11, 12, 13, 14, 15, 16])
    assert drafts(drafter, "mine", [1, 11, 12], 13) == [14, 15, 16]
    assert drafts(drafter, "yours", [1, 11, 12], 13) == []
    assert drafts(drafter, "mine", [12, 13, 14, 9, 11, 12, 13], 14) == [15, 16]  # agrees longer
    assert drafts(drafter, "mine", [0, 11, 12, 13, 14, 9, 0, 11, 12, 13], 14) == [9, 0, 11, 12, 13]
    drafter.close()
    assert drafts(drafter, "mine", [1, 11, 12], 13) == []
    assert BORDER > 2**30


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_memory_too_small_to_help_is_refused(wrong):
    with pytest.raises(ValueError, match=r"remember: wants 0 \(nothing\) or >= 256 tokens"):
        Suffix(remember=wrong)


def test_nobody_is_drafted_what_another_client_was_answered():
    """Who asks for origins sees the drafts that were given up."""
    asked = {"max_tokens": 40, "ignore_eos": True}
    with serving(
        "flow=speculative", "drafter=suffix", "drafter.remember=4096", "tier=none"
    ) as engine:
        first, other, again = (
            engine.generate(prompt_ids(20), client=name, **asked) for name in ("a", "b", "a")
        )
    assert first["speculation"] == other["speculation"]
    assert again["speculation"]["accepted"] > first["speculation"]["accepted"] + 10


@pytest.mark.parametrize("drafter", ["suffix", "cascade"])
def test_a_second_similar_request_accepts_more_and_says_the_same(drafter):
    """The prompts share nothing but their last tokens; the answers, by a peculiar model, do."""
    knob = "drafter.remember=4096" if drafter == "suffix" else "drafter.suffix.remember=4096"
    asked = {"max_tokens": 40, "ignore_eos": True}
    same = prompt_ids(20)
    with serving("flow=plain", "drafter=none", "tier=none") as plain:
        expected = plain.generate(same, **asked)
    with serving("flow=speculative", f"drafter={drafter}", knob, "tier=none") as engine:
        first, second = (engine.generate(same, **asked) for _ in range(2))
        other = engine.generate(prompt_ids(20, seed=5), **asked)
    assert first["token_ids"] == second["token_ids"] == expected["token_ids"]
    assert other["finish_reason"] == "length"
    calls = [answer["speculation"]["target_calls"] for answer in (first, second)]
    assert calls[1] < calls[0] - 10
    assert second["speculation"]["accepted"] > first["speculation"]["accepted"] + 10
