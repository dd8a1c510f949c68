"""The Ray runner on a real cluster of this machine, with two workers."""

from __future__ import annotations

import pytest

from pipeline.errors import OpenError
from pipeline.lab.jobs import Job
from pipeline.lab.runners import RayRunner

SMALL = ("model.layers=2", "workload.requests=1", "workload.max_tokens=4")


def test_points_are_tasks_of_two_workers_and_one_that_fails_costs_no_other():
    jobs = [Job("fake", (*SMALL, f"depth.max={n}"), repeats=1) for n in (1, 2)]
    jobs.append(Job("fake", ("depth.max=many",), repeats=1))
    found = dict(RayRunner(workers=2)(jobs))
    assert sorted(found) == [0, 1, 2]
    assert [found[at]["status"] for at in (0, 1, 2)] == ["ok", "ok", "failed"]
    assert "depth.max: wants a whole number, got 'many'." in found[2]["reason"]
    assert found[1]["contestants"][0]["config"]["depth"]["max"] == 2
    assert len({found[0]["worker"], found[1]["worker"]}) == 2


def test_a_cluster_that_is_not_there_is_named():
    with pytest.raises(OpenError, match=r"no cluster at 127.0.0.1:1.*--runner local"):
        list(RayRunner("127.0.0.1:1")([Job("fake")]))
