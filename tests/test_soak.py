"""The soak's own work: a short one of the model without weights. Minutes of it are a command (docs/soak.md)."""

from __future__ import annotations

import json
import random

import pytest

from pipeline.lab.contestants import Contestant, headrace
from pipeline.lab.soak import run
from pipeline.lab.soak.__main__ import main
from pipeline.lab.soak.questions import questions
from pipeline.lab.soak.rubbish import rubbish
from pipeline.lab.soak.run import report, soak

SECONDS, CLIENTS = 10, 4
SMALL = (
    "constraint=llguidance",
    "tier.ram.max_gb=0.002",
    "server.responses_bytes=100000",
    "stage.release.idle_s=0.3",
)


def test_mixed_and_rude_clients_get_what_they_get_alone(monkeypatch):
    monkeypatch.setattr(run, "REST_S", 0.5)
    one = Contestant("fake", headrace("fake", *SMALL, threads=1), 1)
    one.start()
    try:
        one.wait()
        soaked = soak(one, SECONDS, CLIENTS, 0, lambda text: None)
    finally:
        one.stop()
    figures = {figure.name: figure for figure in soaked.figures()}
    told = json.dumps(report(soaked, list(figures.values())))
    assert soaked.refused == [], told
    for name in ("answers", "different", "our_fault", "unanswered", "taken", "rows"):
        assert figures[name].met, told
    assert figures["memory"].value < 10, told  # seconds are no warm-up
    counts = soaked.seen.counts
    assert counts["left"] > 10 and counts["spoilt"] > 3, told
    assert soaked.took, told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nosuch"], "nosuch: no such recipe."),
        (["fake", "server.keyss=x"], "Did you mean 'server.keys'?"),
        (["fake", "model.layers=-1"], "model.layers: wants >= 0"),
        (
            ["fake", "server.responses_folder=/dev/null/x"],
            "server.responses_folder: cannot be used",
        ),
    ],
)
def test_what_cannot_be_served_is_told_as_by_serve(words, told, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_its_help_says_what_each_word_is(capsys):
    for words in (["--help"], ["fake", "--minutes", "0"], ["fake", "--clients", "x"]):
        with pytest.raises(SystemExit):
            main(words)
    told = capsys.readouterr()
    assert "of asking, beside rests (10)" in told.out and "constraint=llguidance" in told.out
    assert "invalid number above 0 value: '0'" in told.err


def test_rubbish_is_never_what_it_was():
    draw = random.Random(0)
    for question in questions():
        assert all(rubbish(draw, question) != question.data for _ in range(20) if question.streams)
