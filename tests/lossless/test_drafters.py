"""Every drafter on disk keeps the promise, on layers of every kind; what it saved comes back as it was.

A drafter that needs more than its name says so in `NEEDS`; one with a checkpoint gets a tiny one from
tiny_drafters.py. Every combination, also with every KV policy: `make matrix`.
"""

from __future__ import annotations

import pytest
from support import Running, prompt_ids, serving
from tiny_drafters import FAMILIES, ONLY, tiny_pair

from pipeline.catalog import Catalog, package_folder
from pipeline.types import NEUTRAL, Sampling

NEEDS: dict[str, tuple[str, ...]] = {  # {family}: the target's
    "suffix": ("drafter.remember=4096",),
    "two_model": ("draft_model=tiny", "draft_model.family={family}", "draft_model.bits=4"),
}
MIXED = {"dense": "eagle3", "sliding": "assistant", "hybrid": "mtp", "latent": "nextn"}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["ab", "cd"]}},
    "required": ["name", "kind"],
}
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 7}}
FORMS = {
    "free": {"ignore_eos": True},
    "schema": {"grammar": {"json_schema": SCHEMA}},
}
PAIRWISE = [(1, "greedy", "schema"), (4, "sampled", "schema"), (4, "greedy", "free"),
            (1, "sampled", "free")]  # fmt: skip
DRAFTERS = [d for d in Catalog(package_folder("conf")).options("drafter") if d != "none"]
LENGTH, DEPTH = 24, 3
PERIOD = prompt_ids(7)
PROMPTS = [(PERIOD * 9)[:n] + prompt_ids(2, seed=n) for n in (4, 17, 30, 41)]  # something to copy


def pairs():
    """Drafters, and a cascade of a cheap one and one with a checkpoint, with each kind of layers that
    they go with."""
    return [
        (drafter, layers)
        for drafter in [*DRAFTERS, "mixed"]
        for layers in ONLY.get(drafter, FAMILIES)
    ]


def combinations():
    """Pairwise: drafter and layers in full, rows, sampling and form in turn."""
    return [(*pair, *PAIRWISE[(at + at // 4) % 4]) for at, pair in enumerate(pairs())]


def settings(drafter, layers, folder):
    """Overrides of the target and the drafter, the target's first."""
    if drafter == "mixed":
        family, other, path = tiny_pair(MIXED[layers], layers, folder)
        name = other.partition("=")[2]
        path = path.replace("drafter.path", f"drafter.{name}.path")
        return family, "drafter=cascade", f"drafter.order=[ngram,{name}]", path
    found = tiny_pair(drafter, layers, folder)
    family = found[0].partition("=")[2]
    return *found, *(need.format(family=family) for need in NEEDS.get(drafter, ()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drafters")


@pytest.fixture(scope="module")
def plain():
    """target, sampling, form -> the tokens of each prompt alone."""
    known = {}

    def answers(target, sampling, form):
        if (target, sampling, form) not in known:
            overrides = ("flow=plain", "drafter=none", "tier=none", "constraint=llguidance")
            with serving(target, *overrides) as engine:
                known[target, sampling, form] = asked(engine, 1, sampling, form)
        return known[target, sampling, form]

    return answers


def asked(engine, rows, sampling, form):
    """Tokens of each prompt, one after the other, or together with a row that is cancelled."""
    wanted = {"max_tokens": LENGTH, **SAMPLING[sampling], **FORMS[form]}
    if rows == 1:
        return [engine.generate(prompt, **wanted)["token_ids"] for prompt in PROMPTS]
    doomed = Running(engine, PROMPTS[1], max_tokens=4000, ignore_eos=True)
    runs = [Running(engine, prompt, **wanted) for prompt in PROMPTS]
    next(iter(doomed))
    doomed.ticket.cancel()
    found = [run.result()["token_ids"] for run in runs]
    assert list(doomed)[-1].finish_reason == "cancelled"
    return found


@pytest.mark.parametrize(("drafter", "layers", "rows", "sampling", "form"), combinations())
def test_the_tokens_are_those_of_plain_decoding(
    plain, folder, drafter, layers, rows, sampling, form
):
    ours = settings(drafter, layers, folder)
    common = ("flow=speculative", f"depth.max={DEPTH}", "tier=none", "constraint=llguidance")
    with serving(*common, "debug=small", "limits.max_rows=5", *ours) as engine:
        assert asked(engine, rows, sampling, form) == plain(ours[0], sampling, form)
        counts = engine.stats()["counts"]
        assert not counts.get("faults") and not counts.get("draft_faults")
        models = "grade" in engine.pipeline.parts["drafter"].can  # they always have a next token
        assert counts.get("drafted", 0) > 0 or not models


class Follower:
    """Draft rows beside the target's rows, driven round by round without an engine's stages."""

    def __init__(self, engine, histories):
        self.parts = engine.pipeline.parts
        self.drafter, self.target = self.parts["drafter"], self.parts["model"]
        self.histories = [list(ids) for ids in histories]
        self.rows = self.parts["kv"].rows(self.target, DEPTH + 1)
        self.drafts = self.beside()
        self.append()

    def beside(self):
        """Empty draft rows that see the target's."""
        made = self.drafter.rows(self.target, DEPTH + 1)
        getattr(made, "watch", id)(self.rows)
        return made

    def append(self):
        """All rows join with no tokens, then the target reads every history in chunks of 16."""
        blank = [[] for _ in self.histories]
        self.rows.prepare_append([None] * len(blank)).commit()
        self.drafts.prepare_append(blank, [None] * len(blank)).commit()
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

    def commit(self, pending, proposals, kept, how="commit"):
        windows = [[p, *ids] for p, ids in zip(pending, proposals, strict=True)]
        seen = self.forward(windows, kept)
        inputs = [window[:keep] for window, keep in zip(windows, kept, strict=True)]
        getattr(self.drafts, how)(inputs, seen)
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
    """Rounds that keep exactly 0..depth drafts of each row, ragged; some without a draft, and some
    whose draft came to nothing (`consume` after `draft`: a fault in between)."""
    mine = Follower(engine, PROMPTS)
    asked, kept_drafts = 0, set()
    for turn in range(12):
        pending = [
            (ids[-7] if len(ids) > 7 else 40 + row) for row, ids in enumerate(mine.histories)
        ]
        depths = [(turn + row) % (DEPTH + 1) for row in range(len(PROMPTS))]
        if turn % 4 == 3:
            proposals, how = [[] for _ in PROMPTS], "consume"
        else:
            proposals, how = mine.draft(pending, depths), "commit"
            assert proposals == proposals_of(engine, mine.histories, pending, depths)
            asked = max(asked, *map(len, proposals))
        if turn % 6 == 4:
            proposals, how = [[1, 2], [], [3], []], "consume"  # other tokens come than were drafted
        kept = [1 + (turn * 3 + row) % (len(ids) + 1) for row, ids in enumerate(proposals)]
        kept_drafts |= {keep - 1 for keep in kept} if how == "commit" else set()
        mine.commit(pending, proposals, kept, how)
    assert kept_drafts >= set(range(asked + 1)), (asked, kept_drafts)
    restored(engine, mine)
    mine.close()


def restored(engine, mine):
    """Captured and restored, refilled from ids alone, and after a neighbour has gone: all the same."""
    pending, depths = [45, 46, 47, 48], [DEPTH] * 4
    expected = mine.draft(pending, depths)
    mine.commit(pending, expected, [0, 0, 0, 0])  # a round that was lost altogether
    attachments = [mine.drafts.capture(row) for row in range(4)]
    again = mine.beside()
    again.prepare_append(mine.histories, attachments).commit()
    assert again.draft(pending, depths, mine.samplers()) == expected
    if "refill" in mine.drafter.can:
        bare = mine.beside()
        bare.prepare_append(mine.histories, [None] * 4).commit()
        assert bare.draft(pending, depths, mine.samplers()) == expected
        bare.close()
    mine.rows.filter([2, 0])  # two of four are cancelled
    again.filter([2, 0])
    assert again.draft([47, 45], depths[:2], mine.samplers()[2::-2]) == [expected[2], expected[0]]
    again.check_integrity()
    again.close()


@pytest.mark.parametrize(("drafter", "layers"), pairs())
def test_after_each_round_it_is_as_if_fed_afresh(folder, drafter, layers):
    common = ("flow=speculative", f"depth.max={DEPTH}", "tier=none", "constraint=llguidance")
    with serving(*common, *settings(drafter, layers, folder)) as engine:
        engine.exclusive(lambda: rounds(engine))
