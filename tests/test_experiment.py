"""What is typed goes before what an experiment's cases say, and labels say what is measured."""

from __future__ import annotations

import re
import shlex

import pytest

from pipeline.catalog import find_recipe
from pipeline.errors import ConfigError
from pipeline.lab.experiment import read

DEEP = [f"depth.max={n}" for n in range(1, 12)]


def labels(name, *said):
    return [point.label for point in read(name, said, {}).points]


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        # of options it leaves the cases that choose it, with what is theirs
        ("drafters", "drafter=suffix workload=chat", ["drafter=suffix"]),
        ("drafters", "drafter=cascade workload=chat", ["drafter=cascade drafter.order=[grammar,suffix]"]),
        ("tiers", "tier=[ram]", ["tier=[ram]", "tier=[ram] tier.ram.max_gb=0.01"]),
        # one that no case has is a case of its own
        ("drafters", "drafter=ngram,mine workload=chat", ["drafter=ngram", "drafter=mine"]),
        (
            "drafters", "drafter=two_model model@draft_model=tiny workload=chat",
            ["drafter=two_model depth.max=4 draft_model=tiny"],
        ),
        # where no case says anything of it, it goes with each
        (
            "tiers", "kv=kv8,kv4 tier=none,[ram,disk]",
            [
                "tier=none kv=kv8", "tier=none kv=kv4",
                "tier=[ram,disk] tier.ram.max_gb=0.01 kv=kv8", "tier=[ram,disk] tier.ram.max_gb=0.01 kv=kv4",
            ],
        ),
        # a setting replaces theirs; cases that are then alike are one
        (
            "depth", "depth.max=3",
            [
                "drafter=none", "drafter=suffix depth.max=3", "drafter=suffix depth=adaptive depth.max=3",
                "drafter=random depth.max=3",
            ],
        ),
        ("depth", "drafter=random depth.max=range(1,12)", [f"drafter=random {deep}" for deep in DEEP]),
        # how deep nobody drafts makes no points
        ("depth", "drafter=none depth.max=range(1,12)", ["drafter=none"]),
        ("depth", "drafter=none depth=fixed,adaptive", ["drafter=none"]),
        ("depth", "drafter=none,random depth.max=3", ["drafter=none", "drafter=random depth.max=3"]),
        ("fake", "drafter=none kv=native,kv8 depth.max=1,2", ["kv=native", "kv=kv8"]),
        (
            "fake", "drafter=none,ngram depth.max=1,2",
            ["drafter=none", "drafter=ngram depth.max=1", "drafter=ngram depth.max=2"],
        ),
        ("tiers", "~tier.ram.max_gb", ["tier=none", "tier=[ram]", "tier=[ram,disk]"]),
        # an option is one however it is typed
        ("tiers", "tier=ram", ["tier=[ram]", "tier=[ram] tier.ram.max_gb=0.01"]),
        ("tiers", "tier=[]", ["tier=none"]),
        ("tiers", "tier=disk,[ram]", ["tier=[ram]", "tier=[ram] tier.ram.max_gb=0.01", "tier=disk"]),
        # a setting goes with what takes it; the others are there once, as they are
        (
            "drafters", "draft_model.bits=2,4 workload=chat",
            [
                "drafter=none", "drafter=ngram", "drafter=suffix",
                "drafter=cascade drafter.order=[grammar,suffix]",
                "drafter=two_model draft_model=smollm2 depth.max=4 draft_model.bits=2",
                "drafter=two_model draft_model=smollm2 depth.max=4 draft_model.bits=4",
            ],
        ),
        (
            "tiers", "tier.ram.max_gb=0.1,1",
            [
                "tier=none", "tier=[ram] tier.ram.max_gb=0.1", "tier=[ram] tier.ram.max_gb=1",
                "tier=[ram,disk] tier.ram.max_gb=0.1", "tier=[ram,disk] tier.ram.max_gb=1",
            ],
        ),
        ("tiers", "tier=none,ram tier.ram.max_gb=1", ["tier=none", "tier=[ram] tier.ram.max_gb=1"]),
        (
            "drafters", "drafter.order=[suffix,grammar] drafter=none,cascade workload=chat",
            ["drafter=none", "drafter=cascade drafter.order=[suffix,grammar]"],
        ),
        (
            "drafters", "drafter=ngram,cascade drafter.suffix.min_match=2,4 workload=chat",
            [
                "drafter=ngram", "drafter=cascade drafter.order=[grammar,suffix] drafter.suffix.min_match=2",
                "drafter=cascade drafter.order=[grammar,suffix] drafter.suffix.min_match=4",
            ],
        ),
        ("kv_quality", "kv=native,kv4 kv.bits=2,3", ["kv=native", "kv=kv4 kv.bits=2", "kv=kv4 kv.bits=3"]),
        ("fake", "kv=native,kv4 kv.bits=2", ["kv=native", "kv=kv4 kv.bits=2"]),
        # that nobody takes it is said of each
        ("fake", "kv=native,kv4 kv.bitz=2", ["kv=native", "kv=kv4"]),
    ],
)  # fmt: skip
def test_what_is_typed_goes_before_what_cases_say(name, said, expected):
    assert labels(name, *said.split()) == expected


def test_a_list_is_the_same_with_spaces_in_it():
    assert labels("tiers", "tier=[ram, disk]") == ["tier=[ram,disk] tier.ram.max_gb=0.01"]


def test_a_setting_that_no_point_takes_stays_in_all_and_is_refused():
    points = read("fake", ["kv=native,kv4", "kv.bitz=2"], {}).points
    assert all("kv.bitz=2" in point.overrides for point in points)
    points = read("fake", ["kv=native,kv4", "kv.bits=2"], {}).points
    assert ["kv.bits=2" in point.overrides for point in points] == [False, True]


def test_a_mistake_is_not_dropped_because_nobody_drafts():
    points = read("fake", ["drafter=none", "kv=native,kv8", "depth.maxx=4"], {}, []).points
    assert all("depth.maxx=4" in point.overrides for point in points)


@pytest.mark.parametrize(
    "said", [("drafter=none", "depth.max=1,2"), ("drafter=none", "depth=fixed,adaptive")]
)
def test_how_deep_nobody_drafts_is_nothing_to_compare(said):
    with pytest.raises(
        ConfigError, match=r"where nobody drafts .* how deep makes none. Add .*drafter=suffix"
    ):
        read("fake", said, {})
    assert len(read("rows", said, {}).points) == 8


def tries():
    """The sweeps in the headers of shipped experiments."""
    for name in ("kv_quality", "drafters", "depth", "tiers", "rows"):
        for line in find_recipe(name).read_text().splitlines():
            if found := re.match(r"#.* headrace sweep (.*)", line):
                yield found[1]


NUMBERS = {
    "kv_quality kv=native,kv8,kv4 workload.prompt_words=700": 3,
    "kv_quality kv=kv4 kv.bits=2,3,4,6 kv.group_size=32,64": 8,
    "drafters drafter=ngram,suffix depth.max=4,8,16 workload=copy_edit": 6,
    "drafters workload=chat workload.temperature=0,0.8": 10,
    "depth drafter=random 'depth.max=range(1,12)'": 11,
    "depth workload.clients=4 workload.requests=8": 12,
    "tiers workload.shared_words=150,350,700": 12,
    "tiers kv=native,kv8,paged": 12,
    "rows workload=chat workload.clients=8": 8,
    "rows drafter=suffix workload=copy_edit": 8,
    "kv_quality": 7, "drafters": 15, "depth": 12, "tiers": 4, "rows": 8,
}  # fmt: skip


def test_headers_sweep_what_they_say():
    assert {line: len(labels(*shlex.split(line))) for line in tries()} == NUMBERS


@pytest.mark.parametrize(
    "line", [*NUMBERS, "drafters drafter=suffix", "depth depth.max=3,5 depth=adaptive,confidence"]
)
def test_labels_say_what_is_measured(line):
    name, *said = shlex.split(line)
    points = read(name, said, {}).points
    assert len({point.label for point in points}) == len(points)
    for point in points:
        last = {text.partition("=")[0]: text for text in point.overrides}
        assert all(last[text.partition("=")[0]] == text for text in point.own)
