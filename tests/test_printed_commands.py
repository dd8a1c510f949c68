"""A command that is printed can be typed: it lets in the code that the run it stands for let in."""

from __future__ import annotations

import shlex

import pytest

from pipeline.catalog import find_recipe
from pipeline.cli import main
from pipeline.cli.arguments import parse
from pipeline.lab.experiment import Experiment
from pipeline.lab.sides import Checked
from pipeline.lab.sweep import Row
from pipeline.lab.tables import repeat

ALLOW = ["--allow-code", "somebodys_other"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The override that takes somebody's class."""
    code = "from stages.depth.fixed import Fixed\n\nclass Mine(Fixed):\n    pass\n"
    (tmp_path / "somebodys_other.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "depth._target_=somebodys_other.Mine"


def test_each_point_of_a_sweep_can_be_measured_again(mine):
    wanted = Experiment("fake", find_recipe("fake"), (), ("kl",), 1, 64, tuple(ALLOW[1:]))
    lines = repeat(wanted, Row(1, ("depth.max=1",), (mine, "depth.max=1")))
    assert [line.split()[1] for line in lines] == ["bench", "quality"]
    for line in lines:
        again = parse(shlex.split(line)[1:])
        assert Checked.of(again.recipe, again.overrides, again.allow_code).allow == wanted.allow


@pytest.mark.parametrize("verb", ["sweep", "bench", "tune"])
def test_what_was_measured_can_be_measured_again(verb):
    more = ["--goal", "latency", "-o", "x.yaml"] if verb == "tune" else []
    args = parse([verb, "fake", "depth.max=2", *more, *ALLOW])
    assert f"headrace {verb} fake depth.max=2 {shlex.join(ALLOW)}" in args.verb._command(args)
    if verb == "tune":
        assert args.verb._next(args, "serve") == f"headrace serve x.yaml {shlex.join(ALLOW)}"


def test_what_was_locked_can_be_served(mine, tmp_path, capsys):
    place = str(tmp_path / "a lock.lock.yaml")
    assert main(["lock", "fake", mine, *ALLOW, "-o", place]) == 0
    next_line = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    replay, serve = map(shlex.split, next_line.split("; "))
    assert serve == ["headrace", "serve", place, *ALLOW]
    assert main(replay[1:]) == 0
