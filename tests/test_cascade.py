"""A cascade: who drafts, who follows, what a member's failure costs, and how it is written."""

from __future__ import annotations

import mlx.core as mx
import pytest
from support import serving

from pipeline.build import build
from pipeline.compose import compose
from pipeline.errors import ConfigError
from pipeline.plan import plan
from pipeline.types import Attachment, GuardedRows, Owner
from stages.drafters.cascade import Cascade, CascadeRows
from stages.drafters.history import HistoryRows
from stages.drafters.ngram import NGram
from stages.drafters.suffix import Suffix


class Fixed:
    """Proposes one thing, notes what it is told, and can be made to fail."""

    def __init__(self, answer):
        self.answer, self.log, self.failing, self.wrong = answer, [], "", None

    def __call__(self):
        self.log.append("made")
        return _Rows(self)


class _Rows(HistoryRows):
    def __init__(self, said):
        super().__init__(lambda: _Row(said))
        self.said = said

    def _noted(self, name, *what):
        if self.said.failing == name:
            raise RuntimeError("a member's own fault")
        self.said.log.append((name, *what))

    def draft(self, pending, depths, samplers):
        self._noted("draft", list(depths))
        if any(
            d and r.ids[:1] == [self.said.wrong] for d, r in zip(depths, self._rows, strict=True)
        ):
            raise RuntimeError("a row's own fault")
        return super().draft(pending, depths, samplers)

    def commit(self, inputs, hidden=None):
        self._noted("commit", inputs)
        super().consume(inputs)

    def consume(self, inputs, hidden=None):
        self._noted("consume", inputs)
        super().consume(inputs)

    def capture(self, row):
        facts = {"row": row, "answer": len(self.said.answer)}
        return Attachment("own", "toy-v1", facts, (mx.array(self.said.answer),))


class _Row:
    def __init__(self, said):
        self.said, self.ids = said, []

    def extend(self, tokens):
        self.ids += tokens

    def propose(self, pending, depth):
        return self.said.answer[:depth] if self.ids[-1:] != [0] else []

    def check_integrity(self):
        pass


def cascade(*makes):
    members = [GuardedRows(make, 100, "one") for make in makes]
    return CascadeRows("x", members, [True] * len(members))


def joined(rows, *tokens):
    change = rows.prepare_append([list(t) for t in tokens], [None] * len(tokens))
    change.commit()
    change.dispose()


def asked(rows, depths=(4, 4)):
    return rows.draft([5] * len(depths), list(depths), [None] * len(depths))


def test_the_first_proposal_that_is_not_empty_wins_row_by_row():
    first, second = Fixed([1, 2]), Fixed([7, 8, 9])
    rows = cascade(first, second)
    joined(rows, [3], [0])
    assert asked(rows) == [[1, 2], []]
    joined(rows, [4])
    second.answer = [7, 8, 9]
    first.answer = []
    assert asked(rows, (4, 4, 2)) == [[7, 8, 9], [], [7, 8]]


def test_who_was_asked_commits_and_who_was_not_consumes():
    first, second = Fixed([1]), Fixed([7])
    rows = cascade(first, second)
    joined(rows, [3])
    asked(rows, (4,))
    rows.commit([[5, 1]])
    assert first.log[-1] == ("commit", [[5, 1]])
    assert second.log[-1] == ("consume", [[5, 1]])
    first.answer = []
    asked(rows, (4,))
    rows.commit([[6]])
    assert first.log[-1] == ("commit", [[6]])
    assert second.log[-1] == ("commit", [[6]])
    rows.consume([[2]])
    assert first.log[-1] == second.log[-1] == ("consume", [[2]])


@pytest.mark.parametrize("where", ["draft", "commit", "consume"])
def test_a_members_failure_costs_that_member_only(where):
    first, second = Fixed([1]), Fixed([7])
    rows = cascade(first, second)
    joined(rows, [3], [4])
    first.failing = where
    found = asked(rows)
    assert found == ([[7], [7]] if where == "draft" else [[1], [1]])
    (rows.consume if where == "consume" else rows.commit)([[5], [5, 1]])
    first.failing = ""
    rows.consume([[8], [8]])
    assert first.log.count("made") == 2
    rows.check_integrity()
    assert asked(rows) == [[1], [1]]
    told, by_row = rows.faults()
    assert [str(fault) for fault in told] == [f'one {where}: RuntimeError("a member\'s own fault")']
    assert by_row == [1, 1]
    assert rows.faults() == ([], [0, 0])


def test_a_row_that_a_member_fails_on_costs_its_own_proposals_only():
    first, second = Fixed([1]), Fixed([7])
    first.wrong = 4  # a row that begins with it
    rows = cascade(first, second)
    joined(rows, [3], [4], [5])
    found = []
    for _ in range(20):
        found.append(asked(rows, (1, 1, 1)))
        rows.commit([[5], [5], [5]])
    assert found[0] == [[7], [7], [7]], "who it was is not known yet"
    assert all(ids[1] == [7] for ids in found)
    assert sum(ids == [[1], [7], [1]] for ids in found) >= 15
    assert rows.faults()[1][1] > rows.faults()[1][0]


def test_a_member_that_fails_for_ever_is_left_alone_in_the_end():
    first, second = Fixed([1]), Fixed([7])
    rows = cascade(first, second)
    joined(rows, [3])
    first.failing = "draft"
    for _ in range(30):
        assert asked(rows, (1,)) == [[7]]
        rows.commit([[5]])
    assert first.log.count("made") <= 10


def test_attachments_of_all_members_come_back_to_each():
    first, second, got = Fixed([1]), Fixed([7, 8]), []
    rows = cascade(first, lambda: HistoryRows(lambda: _Row(first)), second)
    joined(rows, [3])
    attachment = rows.capture(0)
    assert attachment.namespace == "x"
    assert len(attachment.tensors) == 2
    for member in rows._members:
        member.prepare_append = lambda tokens, own, got=got: got.extend(own)
    rows.prepare_append([[3]], [attachment])
    assert [a and (a.schema, a.metadata["answer"], a.tensors[0].tolist()) for a in got] == [
        ("toy-v1", 1, [1]), None, ("toy-v1", 2, [7, 8]),
    ]  # fmt: skip


def test_rows_that_wear_adapters_are_drafted_for_by_those_who_can_follow():
    rows = cascade(Fixed([1, 2]), Fixed([7, 8]))
    rows._follow = [False, True]
    joined(rows, [3], [4])
    rows.assign([Owner(), Owner(adapted=True)])
    assert asked(rows) == [[1, 2], [7, 8]]
    rows.assign([Owner(adapted=True), Owner(adapted=True)])
    assert asked(rows) == [[7, 8], [7, 8]]


def test_what_a_cascade_is_by_its_members():
    mine = Cascade([NGram(), Suffix()])
    assert mine.can == NGram.can & Suffix.can == {"refill", "external", "adapters"}
    assert (mine.prefill, tuple(mine.taps), mine.weight_bytes) == ("tail", (), 0)
    assert mine.namespace != Cascade([Suffix(), NGram()]).namespace
    head = NGram()
    head.can = frozenset({"external"})
    assert Cascade([head, Suffix()]).can == {"external", "adapters"}
    closed = NGram()
    closed.can = frozenset({"refill"})
    Cascade([closed])
    with pytest.raises(ConfigError, match=r"ngram:5:3:1.* cannot follow"):
        Cascade([closed, Suffix()])


def built(*overrides):
    return build(plan(compose("fake", ["drafter=cascade", *overrides])))


def test_members_are_options_of_the_group_with_their_own_knobs():
    members = built("drafter.order=[suffix,ngram]", "drafter.ngram.min_ngram=4").parts["drafter"]
    assert [m.namespace for m in members.members] == ["suffix:3:1.0:0", "ngram:5:4:1:latest"]
    shown = plan(compose("fake", ["drafter=cascade", "drafter.ngram.max_ngram=9"])).config[
        "drafter"
    ]
    assert shown["ngram"]["max_ngram"] == 9
    assert shown["suffix"]["_target_"].endswith("Suffix")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "drafter.order=[ngram,sufix]",
            "drafter.order: 'sufix' is no option.*Did you mean 'suffix'",
        ),
        ("drafter.order=[ngram,ngram]", "'ngram' is there twice"),
        ("drafter.order=[]", "wants a list of options of drafter"),
        ("drafter.order=ngram", "wants a list of options of drafter"),
        (
            "drafter.suffix.min_mach=4",
            "drafter.suffix.min_mach: .*Did you mean 'drafter.suffix.min_match'",
        ),
        ("drafter.random.seed=3", "'random' is not in the list order.*drafter.order="),
        ("drafter.ngram=3", "drafter.ngram: wants settings by name"),
        ("drafter.ngram.min_ngram=x", "drafter.ngram.min_ngram: wants a whole number"),
    ],
)
def test_what_does_not_fit_is_said(override, says):
    with pytest.raises(ConfigError, match=says):
        built(override)


def test_it_serves_the_same_tokens():
    with serving("drafter=none", "flow=plain", recipe="fake") as engine:
        plain = engine.generate("one two one two one", max_tokens=250)["token_ids"]
    with serving("drafter=cascade", "depth.max=4", recipe="fake") as engine:
        answer = engine.generate("one two one two one", max_tokens=250)
    assert answer["token_ids"] == plain
    assert answer["speculation"]["accepted"] > 0
