"""The soak's own work: a short one of the model without weights. Minutes of it are a command (docs/soak.md)."""

from __future__ import annotations

import json
import random

from pipeline.lab.contestants import Contestant, headrace
from pipeline.lab.soak import run
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


def test_rubbish_is_never_what_it_was():
    draw = random.Random(0)
    for question in questions():
        assert all(rubbish(draw, question) != question.data for _ in range(20) if question.streams)
