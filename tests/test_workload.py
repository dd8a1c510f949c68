"""What a benchmark asks: the same requests every time, a user's own, and what is wrong with either."""

from __future__ import annotations

import json

import pytest

from pipeline.build import build
from pipeline.catalog import Catalog, package_folder
from pipeline.compose import compose
from pipeline.errors import ConfigError
from pipeline.lab.driving import body
from pipeline.lab.workload import Workload
from pipeline.plan import plan

OPTIONS = sorted(set(Catalog(package_folder("conf")).options("workload")) - {"jsonl"})


def workload(*overrides):
    return build(plan(compose("fake", overrides))).settings["workload"]


def said(arrival):
    return "\n".join(turn["content"] for turn in arrival.request.messages)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_pass_is_the_same_every_time_and_another_pass_asks_something_else(option):
    made = workload(f"workload={option}")
    assert made.arrivals(0) == workload(f"workload={option}").arrivals(0)
    first, second = ([said(one) for one in made.arrivals(turn)] for turn in (0, 1))
    assert len(first) == made.requests
    assert first != second
    assert made.arrivals(0) != workload(f"workload={option}", "workload.seed=1").arrivals(0)


def test_what_each_option_is_about():
    assert len(said(workload("workload=long_prompt").arrivals(0)[0]).split()) > 350
    systems = [one.request.messages[0] for one in workload("workload=shared_prefix").arrivals(0)]
    assert systems[0]["role"] == "system" and len(systems[0]["content"].split()) == 350
    assert all(system == systems[0] for system in systems)
    assert "Repeat the following text" in said(workload("workload=copy_edit").arrivals(0)[0])
    forms = workload("workload=json").arrivals(0)
    assert all(json.loads(one.request.grammar.source)["required"] for one in forms)


def test_mixed_requests_come_at_random_times_in_many_lengths_and_some_clients_leave():
    arrivals = workload("workload=mixed", "workload.requests=60").arrivals(0)
    times = [one.at for one in arrivals]
    assert times == sorted(times) and 30 < times[-1] < 120  # one a second
    lengths = [one.request.max_tokens for one in arrivals]
    assert min(lengths) < 30 < 60 < max(lengths) <= 77
    left = [one for one in arrivals if one.leave_after]
    assert 3 <= len(left) <= 18
    assert all(one.leave_after <= one.request.max_tokens for one in left)


def test_a_request_in_openais_form():
    (arrival, *_) = workload("workload=json", "workload.temperature=0.5").arrivals(0)
    path, told = body(arrival.request)
    assert path == "/v1/chat/completions"
    assert told["response_format"]["json_schema"]["schema"]["type"] == "object"
    assert (told["temperature"], told["max_tokens"], told["seed"]) == (0.5, 80, 0)


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "One", "at": 2.5, "stop": ["x"]},
        {"messages": [{"role": "user", "content": "Two"}], "max_tokens": 7, "leave_after": 3},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    one, two = workload("workload=jsonl", f"workload.path={file}").arrivals(0)
    assert (one.at, one.request.text, one.request.max_tokens) == (2.5, "One", 64)
    assert body(one.request)[0] == "/v1/completions" and body(one.request)[1]["stop"] == ["x"]
    assert (two.leave_after, two.request.max_tokens, said(two)) == (3, 7, "Two")


def test_all_mistakes_of_a_file_are_named_with_their_lines(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": 3}\nno json\n{"max_tokens": 1}\n{"prompt": "x", "tempratur": 0}\n[]\n'
    )
    made = workload("workload=jsonl", f"workload.path={file}")
    with pytest.raises(ConfigError) as caught:
        made.arrivals(0)
    lines = str(caught.value).splitlines()
    assert lines[0] == "- workload.path line 1 prompt: wants a text, got 3."
    assert lines[1].startswith("- workload.path line 2: is no JSON")
    assert lines[2] == "- workload.path line 3: wants either prompt or messages."
    assert "line 4 tempratur: no such field. Did you mean 'temperature'?" in lines[3]
    assert lines[4].startswith("- workload.path line 5: wants an object.")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"texts": ["chatt"]}, "workload.texts: no kind of text 'chatt'. Did you mean 'chat'?"),
        ({"texts": []}, "workload.texts: wants one kind or more."),
        ({"requests": 0}, "workload.requests: wants 1 to 100000, got 0"),
        ({"rate": 0.0}, "workload.rate: wants more than 0"),
        ({"path": "x"}, "workload.path: is the file of workload=jsonl"),
        ({"texts": ["file"]}, "Try: workload=jsonl workload.path=FILE"),
        ({"spread": 1.5, "leave": -1}, "workload.leave: wants 0 to 1, got -1"),
    ],
)
def test_what_is_wrong_with_settings_is_said(settings, text):
    with pytest.raises(ConfigError) as caught:
        Workload(**settings)
    assert text in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    made = workload("workload=jsonl", f"workload.path={tmp_path / 'no'}")
    with pytest.raises(
        ConfigError, match=r"no cannot be read: No such file or directory. Type workload.path=FILE"
    ):
        made.arrivals(0)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no request"):
        workload("workload=jsonl", f"workload.path={tmp_path / 'empty'}").arrivals(0)
