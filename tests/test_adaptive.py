"""The adaptive depth in a world whose costs and odds are known."""

from __future__ import annotations

import random

import pytest

import stages.depth.adaptive as module
from pipeline.types import Batch, Emitted, Proposal, Request, Sequence
from stages.depth.adaptive import Adaptive
from stages.depth.evidence import Costs, Odds, Plain, RowNotes, Worth


class World:
    """Rounds with a made-up clock. `right(row, round, index)`: whether that draft would be accepted."""

    def __init__(self, depth, rows, cost, offered, right, drafting=0.0, lost=0.0):
        self.depth, self.cost, self.right, self.drafting = depth, cost, right, drafting
        self.lost, self.wide = (
            lost,
            False,
        )  # seconds that a plain round takes longer after a wide one
        self.offered = offered  # (row, round) -> length of what the drafter would propose
        self.rows = [Sequence(Request(id=str(i)), print, max_new=10**9) for i in range(rows)]
        self.seconds, self.tokens, self.round = 0.0, 0, 0
        self.places = [0] * rows  # the true token at place p is p

    def play(self, rounds, monkeypatch):
        for _ in range(rounds):
            batch = Batch(self.rows, None, None)
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.seconds)
            began, depths = self.seconds, self.depth.choose(batch)
            offers = [self.propose(index, depth) for index, depth in enumerate(depths)]
            lengths = [0] * len(depths)
            if any(depths):
                self.seconds += self.drafting * max(depths)
                lengths = self.depth.cut(batch, offers)
            for index, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
                row.proposal, row.accepted = offers[index].cut(length), 0
                while row.accepted < length and row.proposal[row.accepted] >= 0:
                    row.accepted += 1
                place = self.places[index]
                row.emitted = [Emitted(place + i) for i in range(row.accepted + 1)]
                self.places[index] += row.accepted + 1
                self.tokens += row.accepted + 1
            self.seconds += self.cost(len(self.rows), 1 + max(lengths))
            self.seconds += self.lost if self.wide and not any(lengths) else 0.0
            self.wide = any(lengths)
            self.depth.observe(batch, self.seconds - began)
            self.round += 1
        return self

    def propose(self, row, depth):
        """What a drafter says that is right where `right` says so."""
        length, place = min(depth, self.offered(row, self.round)), self.places[row]
        return Proposal(place + i if self.right(row, self.round, i) else -1 for i in range(length))

    @property
    def rate(self):
        return self.tokens / self.seconds


def cost(rows, width):
    return (1 + 0.3 * (rows - 1)) * (1 + 0.08 * (width - 1)) * 0.03


def best_fixed(rows, offered, right, monkeypatch, drafting=0.0):
    class Always(Adaptive):
        def choose(self, batch):
            return [self.max] * len(batch.sequences)

        def cut(self, batch, proposals):
            return [len(p) for p in proposals]

    def one(n):
        return World(Always(max=n), rows, cost, offered, right, drafting).play(60, monkeypatch).rate

    return max(one(n) for n in (1, 2, 4, 8, 16))


@pytest.mark.parametrize("rows", [1, 4])
def test_copies_reach_the_best_fixed_depth(rows, monkeypatch):
    def offered(row, round):
        return min(16, 3 * 2 ** min(round, 8))

    def right(row, round, index):
        return True

    mine = World(Adaptive(), rows, cost, offered, right).play(60, monkeypatch)
    assert mine.rate > 0.95 * best_fixed(rows, offered, right, monkeypatch)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("odds", [0.0, 0.05, 0.2, 0.5])
def test_never_slower_than_plain(rows, odds, monkeypatch):
    draw = random.Random(3)
    table = [[draw.random() < odds for _ in range(16)] for _ in range(997)]
    offers = [16 if draw.random() < 0.3 else 0 for _ in range(991)]

    def offered(row, round):
        return offers[(round * 7 + row) % 991]

    def right(row, round, index):
        return table[(round * 5 + row) % 997][index]

    mine = World(Adaptive(), rows, cost, offered, right).play(300, monkeypatch)
    assert mine.rate > 0.97 * rows / cost(rows, 1)


@pytest.mark.parametrize("odds", [0.2, 0.4])
def test_four_rows_lose_nothing_while_costs_are_unknown(odds, monkeypatch):
    """A column of four rows is four tokens: it costs more of a pass than one row's does."""

    def dear(rows, width):
        return 0.048 * (1 + 0.23 * (width - 1))

    draw = random.Random(5)
    table = [[draw.random() < odds for _ in range(16)] for _ in range(997)]

    def offered(row, round):
        return 3 if (round + row) % 4 == 0 else 0

    def right(row, round, index):
        return table[(round * 5 + row) % 997][index]

    mine = World(Adaptive(), 4, dear, offered, right).play(60, monkeypatch)
    assert mine.rate > 0.97 * 4 / dear(4, 1)


@pytest.mark.parametrize("odds", [0.3, 0.5, 0.6, 0.7, 0.8])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_a_wide_round_takes_from_the_next_is_counted(rows, odds, monkeypatch):
    """A plain round that follows a wide one takes a tenth longer: its graph was not built ahead."""

    def dear(rows, width):
        return 0.048 * (1 + (0.1 + 0.06 * rows) * (width - 1))

    shares = []
    for seed in range(6):
        draw = random.Random(seed)
        table = [[draw.random() < odds for _ in range(16)] for _ in range(997)]
        lengths = [3 if draw.random() < 0.25 else 0 for _ in range(991)]
        world = World(
            Adaptive(),
            rows,
            dear,
            lambda row, round, lengths=lengths: lengths[(round * 7 + row * 31) % 991],
            lambda row, round, index, table=table: table[(round * 5 + row * 13) % 997][index],
            lost=0.005,
        )
        world.play(90, monkeypatch)
        began = world.tokens, world.seconds
        world.play(200, monkeypatch)
        rate = (world.tokens - began[0]) / (world.seconds - began[1])
        shares.append(rate * dear(rows, 1) / rows)
    assert min(shares) > 0.97


def test_a_row_that_begins_to_repeat_is_noticed_though_nothing_is_verified(monkeypatch):
    """Others have been wrong for long; the row's own refused proposals come true."""
    depth = Adaptive()
    World(depth, 1, cost, lambda *_: 16, lambda *_: False).play(200, monkeypatch)
    world = World(depth, 1, cost, lambda *_: 16, lambda *_: True).play(12, monkeypatch)
    assert world.tokens > 6 * 17


def test_one_interruption_does_not_rule_a_width_out(monkeypatch):
    def slow_once(rows, width):
        met.append(width)
        return cost(rows, width) * (5 if width > 1 and met.count(width) == 1 else 1)

    met: list[int] = []
    world = World(Adaptive(), 1, slow_once, lambda *_: 8, lambda *_: True).play(40, monkeypatch)
    assert world.tokens > 36 * 9


def test_a_costly_drafter_that_is_wrong_is_not_asked_any_more(monkeypatch):
    world = World(Adaptive(), 1, cost, lambda *_: 16, lambda *_: False, drafting=0.01)
    asked = []
    choose = world.depth.choose
    monkeypatch.setattr(world.depth, "choose", lambda batch: asked.append(d := choose(batch)) or d)
    assert world.play(600, monkeypatch).rate > 0.97 / cost(1, 1)
    assert 3 < sum(map(any, asked)) < 20


def test_a_cheap_drafter_that_is_wrong_is_tried_for_its_costs_only(monkeypatch):
    """What it proposes is compared with what came instead, so nothing need be verified for that."""
    depth, tries = Adaptive(), []
    World(depth, 1, cost, lambda *_: 16, lambda *_: False).play(100, monkeypatch)
    cut = depth.cut
    monkeypatch.setattr(depth, "cut", lambda *asked: tries.append(c := cut(*asked)) or c)
    World(depth, 1, cost, lambda *_: 16, lambda *_: False).play(256, monkeypatch)
    assert sum(map(any, tries)) == 2


def test_what_a_costly_drafter_says_before_its_cost_is_known_is_cut_too(monkeypatch):
    cuts = []
    depth = Adaptive()
    cut = depth.cut
    monkeypatch.setattr(depth, "cut", lambda *asked: cuts.append(c := cut(*asked)) or c)
    World(depth, 1, cost, lambda *_: 16, lambda *_: False, drafting=0.01).play(1, monkeypatch)
    assert 0 < cuts[0][0] < 16


def test_it_comes_back_when_drafts_become_right(monkeypatch):
    def right(row, round, index):
        return round >= 200

    world = World(Adaptive(), 1, cost, lambda *_: 16, right)
    world.play(200, monkeypatch)
    before = world.tokens, world.seconds
    world.play(200, monkeypatch)
    late = (world.tokens - before[0]) / (world.seconds - before[1])
    assert late > 1.5 / cost(1, 1)


def test_a_new_row_begins_with_what_others_have_shown():
    pooled = Odds()
    for _ in range(500):
        pooled.note(4, 0, 0.99)
    assert Odds(pooled).rates[0] < 0.05
    row = Odds(pooled)
    for _ in range(4):
        row.note(8, 8)
    assert row.rates[0] > 0.5
    assert list(row.expected(2))[2] > 1.7


def test_costs_lie_between_what_was_measured():
    costs = Costs()
    assert costs.of(1, 5, 2.5) == 2.5
    costs.note(1, 9, 5.0)  # one interruption
    assert costs.of(1, 9) == 5.0  # nothing better is known
    for _ in range(3):
        costs.note(1, 1, 0.01)
        costs.note(1, 9, 0.018)
    costs.note(1, 5, 5.0)
    assert costs.of(1, 5) == pytest.approx(0.014)
    costs = Costs()
    for _ in range(3):
        costs.note(1, 1, 0.01)
        costs.note(1, 9, 0.018)
    costs.note(1, 9, 5.0)
    assert costs.of(1, 5) == pytest.approx(0.014)
    assert costs.of(1, 17) > costs.of(1, 9) == pytest.approx(0.018)
    assert costs.of(3, 1) == 0.01  # nothing better is known


def test_a_slow_sample_makes_no_pass_free():
    costs = Costs()
    costs.note(1, 8, 0.23)  # an interruption
    costs.note(1, 9, 0.049)
    costs.note(1, 9, 0.25)
    costs.note(1, 16, 0.5)
    assert 0.049 / 9 <= costs.of(1, 1) <= costs.of(1, 4) <= costs.of(1, 8)


def test_promises_are_believed_as_far_as_they_were_kept():
    worth = Worth()
    for _ in range(60):
        worth.note(2.0, 1.0)
    assert worth.share == pytest.approx(0.53, abs=0.03)
    for _ in range(300):
        worth.refused()
    assert 0.85 < worth.share < 0.95
    for _ in range(60):
        worth.note(1.0, 5.0)
    assert worth.share == 1.0


def test_what_a_plain_round_loses_is_measured():
    plain = Plain()
    assert plain.lost(4) == 0.0
    for _ in range(3):
        plain.note(4, 0.050, after_wide=False)
        assert plain.lost(4) == 0.0, "not known yet"
        plain.note(4, 0.055, after_wide=True)
    assert plain.lost(4) == plain.lost(1) == pytest.approx(0.1)
    assert plain.usual(4, 9.0) == 0.05
    assert plain.usual(1, 9.0) == 9.0


def test_notes_end_with_their_sequence():
    notes, row = RowNotes(), Sequence(Request(id="r"), print)
    assert notes.get(row, [1]) is notes.get(row, [2])
    del row
    assert not notes._notes
