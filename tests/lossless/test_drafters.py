"""Every drafter on disk keeps the promise, on layers of every kind; what it saved comes back as it was.
Those that come with a checkpoint of their own are in test_neural.py.

A drafter that needs more than its name says so in `NEEDS`. In CI pairs of choices, with MATRIX=all
(`make matrix`) every combination.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
from support import prompt_ids, serving, together
from tiny_drafters import KINDS

from pipeline.catalog import Catalog, package_folder
from pipeline.types import NEUTRAL, Sampling

NEEDS: dict[str, tuple[str, ...]] = {  # {family}: the target's
    "suffix": ("drafter.remember=4096",),
    "grammar": ("constraint=llguidance",),
    "two_model": ("draft_model=tiny", "draft_model.family={family}", "draft_model.bits=4"),
}
FAMILIES = {"dense": "llama", "sliding": "gemma3", "hybrid": "qwen3_5", "latent": "deepseek_v3"}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 7}}
DRAFTERS = [
    name
    for name in Catalog(package_folder("conf")).options("drafter")
    if name != "none" and name not in KINDS  # a checkpoint fits one target: test_neural.py
]
LENGTH, DEPTH = 24, 3
PERIOD = prompt_ids(7)
PROMPTS = [(PERIOD * 9)[:n] + prompt_ids(2, seed=n) for n in (4, 17, 30, 41)]  # something to copy


def combinations():
    """Pairwise: family and drafter in full, rows and sampling in turn."""
    cells = list(product(DRAFTERS, FAMILIES, (1, 4), SAMPLING))
    if os.environ.get("MATRIX") == "all":
        return cells
    turns = list(product((1, 4), SAMPLING))
    return [
        (drafter, family, *turns[(index + at) % len(turns)])
        for index, drafter in enumerate(DRAFTERS)
        for at, family in enumerate(FAMILIES)
    ]


@pytest.fixture(scope="module")
def plain():
    """family, sampling -> the tokens of each prompt alone."""
    known = {}

    def answers(family, sampling):
        if (family, sampling) not in known:
            overrides = ("flow=plain", "drafter=none", "tier=none")
            with serving(f"model.family={FAMILIES[family]}", *overrides) as engine:
                known[family, sampling] = asked(engine, SAMPLING[sampling], 1)
        return known[family, sampling]

    return answers


def asked(engine, wanted, rows):
    wanted = {"max_tokens": LENGTH, "ignore_eos": True, **wanted}
    if rows == 1:
        return [engine.generate(prompt, **wanted)["token_ids"] for prompt in PROMPTS]
    return [result["token_ids"] for result in together(engine, PROMPTS, **wanted)]


def settings(drafter, family):
    needs = [need.format(family=FAMILIES[family]) for need in NEEDS.get(drafter, ())]
    return (
        f"model.family={FAMILIES[family]}", "flow=speculative", f"drafter={drafter}",
        f"depth.max={DEPTH}", *needs,
    )  # fmt: skip


@pytest.mark.parametrize(("drafter", "family", "rows", "sampling"), combinations())
def test_the_tokens_are_those_of_plain_decoding(plain, drafter, family, rows, sampling):
    with serving(
        "tier=none", "debug=small", "limits.max_rows=4", *settings(drafter, family)
    ) as engine:
        assert asked(engine, SAMPLING[sampling], rows) == plain(family, sampling)
        assert engine.stats()["counts"].get("faults", 0) == 0


class Follower:
    """Draft rows beside the target's rows, driven round by round without an engine's stages."""

    def __init__(self, engine, histories):
        self.parts = engine.pipeline.parts
        self.drafter, self.target = self.parts["drafter"], self.parts["model"]
        self.histories = [list(ids) for ids in histories]
        self.rows = self.parts["kv"].rows(self.target, DEPTH + 1)
        self.drafts = self.drafter.rows(self.target, DEPTH + 1)
        self.append([None] * len(histories))

    def append(self, attachments):
        """All rows join with no tokens, then the target reads every history in chunks of 16."""
        blank = [[] for _ in self.histories]
        self.rows.prepare_append([None] * len(blank)).commit()
        self.drafts.prepare_append(blank, attachments).commit()
        longest = max(map(len, self.histories))
        for start in range(0, longest, 16):
            chunks = [ids[start : start + 16] for ids in self.histories]
            self.drafts.prefill(chunks, self.forward(chunks, [len(c) for c in chunks]))

    def forward(self, inputs, keep):
        """The target's pass; what the drafter's taps saw in it."""
        round = self.rows.begin(inputs)
        taps, target = self.drafter.taps, self.target
        run = (
            (lambda *a: target.tapped(*a, taps)) if taps else (lambda *a: (target.hidden(*a), None))
        )
        hidden, seen = run(round.tokens_BW, round.caches)
        round.launch(hidden, *([] if seen is None else [seen]))
        round.resolve(keep)
        return seen

    def draft(self, pending, depths):
        return self.drafts.draft(pending, depths, self.samplers())

    def samplers(self):
        wanted = Sampling(temperature=0.8, seed=7).over(NEUTRAL)
        return [self.parts["sampler"].bind(wanted, 7, ids, None) for ids in self.histories]

    def commit(self, pending, proposals, kept, drafted=True):
        windows = [[p, *ids] for p, ids in zip(pending, proposals, strict=True)]
        seen = self.forward(windows, kept)
        inputs = [window[:keep] for window, keep in zip(windows, kept, strict=True)]
        (self.drafts.commit if drafted else self.drafts.consume)(inputs, seen)
        for ids, new in zip(self.histories, inputs, strict=True):
            ids += new
        self.drafts.check_integrity()

    def close(self):
        self.rows.close()
        self.drafts.close()


def proposals_of(engine, histories, pending, depths):
    fresh = Follower(engine, histories)
    found = fresh.draft(pending, depths)
    fresh.close()
    return found


def rounds(engine):
    """Rounds that keep exactly 0..depth drafts of each row, ragged, some of them without a draft."""
    mine = Follower(engine, PROMPTS)
    for turn in range(10):
        pending = [
            (ids[-7] if len(ids) > 7 else 40 + row) for row, ids in enumerate(mine.histories)
        ]
        depths = [(turn + row) % (DEPTH + 1) for row in range(len(PROMPTS))]
        drafted = turn % 4 != 3
        proposals = mine.draft(pending, depths) if drafted else [[] for _ in PROMPTS]
        assert proposals == proposals_of(engine, mine.histories, pending, depths) or not drafted
        kept = [1 + (turn * 3 + row) % (len(ids) + 1) for row, ids in enumerate(proposals)]
        mine.commit(pending, proposals, kept, drafted)
    restored(engine, mine)
    mine.close()


def restored(engine, mine):
    """Captured and restored, refilled from ids alone, and after a neighbour has gone: all the same."""
    pending, depths = [45, 46, 47, 48], [DEPTH] * 4
    expected = mine.draft(pending, depths)
    mine.commit(pending, expected, [0, 0, 0, 0])  # a round that was lost altogether
    mine.histories = [list(ids) for ids in mine.histories]
    attachments = [mine.drafts.capture(row) for row in range(4)]
    again = mine.drafter.rows(mine.target, DEPTH + 1)
    again.prepare_append(mine.histories, attachments).commit()
    assert again.draft(pending, depths, mine.samplers()) == expected
    again.filter([2, 0])  # two of four are cancelled
    assert again.draft([47, 45], depths[:2], mine.samplers()[2::-2]) == [expected[2], expected[0]]
    again.check_integrity()
    again.close()
    if "refill" in mine.drafter.can:
        bare = mine.drafter.rows(mine.target, DEPTH + 1)
        bare.prepare_append(mine.histories, [None] * 4).commit()
        assert bare.draft(pending, depths, mine.samplers()) == expected
        bare.close()


@pytest.mark.parametrize(
    ("drafter", "family"), sorted({(drafter, family) for drafter, family, *_ in combinations()})
)
def test_after_each_round_it_is_as_if_fed_afresh(drafter, family):
    with serving("tier=none", *settings(drafter, family)) as engine:
        engine.exclusive(lambda: rounds(engine))
