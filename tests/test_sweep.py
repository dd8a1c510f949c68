"""Experiments become points, points become rows; each is run once, whatever happens in between."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from lab_rows import contestant

from pipeline.catalog import package_folder
from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.lab import experiment, report, sweep
from pipeline.lab.folder import LOCK, FolderError, own, write
from pipeline.lab.jobs import Job, parse, quality
from pipeline.lab.lock import facts
from pipeline.lab.runners import RayRunner, run_here
from pipeline.lab.sides import Checked
from pipeline.lab.table import machine
from pipeline.lab.tables import repeat
from stages import blas

SHIPPED = ("kv_quality", "drafters", "depth", "tiers", "rows")
FAKE = ("model.layers=2",)


def points(recipe, *overrides, **asked):
    return [" ".join(point.own) for point in experiment.read(recipe, overrides, asked).points]


def recipe(folder, body, name="mine"):
    file = folder / f"{name}.yaml"
    file.write_text(
        f"# Goal: a question.\ndefaults: [base, override flow: speculative, _self_]\n{body}\n"
    )
    return str(file)


class Runner:
    """Runs nothing: notes what it was asked, and answers at once. Stops after `most`, as if killed."""

    place: Mapping[str, Any] = {}

    def __init__(self, most=99, bad=()):
        self.asked, self.most, self.bad = [], most, bad

    def __call__(self, jobs):
        for index, job in enumerate(jobs):
            if len(self.asked) == self.most:
                raise KeyboardInterrupt
            self.asked.append(job)
            if any(word in self.bad for word in job.overrides):
                yield index, {"status": "failed", "reason": "no\nroom"}
                continue
            made = contestant("kv=native", 10.0, 64.0, 0.0)
            yield index, {"status": "ok", "machine": machine(1), "contestants": [made]}


def run(wanted, folder, runner, tell=lambda row, of: None):
    return sweep.run(wanted, folder, runner, tell)


def read(*overrides, recipe="fake", **asked):
    return experiment.read(recipe, [*FAKE, *overrides], asked)


@pytest.mark.parametrize(
    ("overrides", "own"),
    [
        (["kv=native,kv8"], ["kv=native", "kv=kv8"]),
        (["depth.max=choice(2,4)"], ["depth.max=2", "depth.max=4"]),
        (["depth.max=range(1,6,2)"], ["depth.max=1", "depth.max=3", "depth.max=5"]),
        (["tier=[],[ram]", "sampler.top_p=0.5"], ["tier=[]", "tier=[ram]"]),
        (
            ["drafter=none,ngram", "kv=native,kv8"],
            [
                "drafter=none kv=native",
                "drafter=none kv=kv8",
                "drafter=ngram kv=native",
                "drafter=ngram kv=kv8",
            ],
        ),
    ],
)
def test_hydras_sweep_grammar(overrides, own):
    assert points("fake", *overrides) == own


def test_cases_go_with_every_parameter_and_the_command_line_wins(tmp_path):
    file = recipe(
        tmp_path,
        """sweep:
  cases: [drafter=none, "drafter=ngram,suffix depth.max=4"]
  params: {workload: "chat,copy_edit", limits.max_rows: [1, 2]}
  metrics: [tokens_per_s]""",
    )
    found = points(file, "workload=chat")
    assert found == [
        "drafter=none limits.max_rows=1",
        "drafter=none limits.max_rows=2",
        "drafter=ngram depth.max=4 limits.max_rows=1",
        "drafter=ngram depth.max=4 limits.max_rows=2",
        "drafter=suffix depth.max=4 limits.max_rows=1",
        "drafter=suffix depth.max=4 limits.max_rows=2",
    ]
    every = experiment.read(file, ["workload=chat"], {}).points[0].overrides
    assert "workload=chat" in every


@pytest.mark.parametrize("name", SHIPPED)
def test_every_point_of_a_shipped_experiment_fits_together(name, tmp_path):
    runner = Runner()
    rows = run(experiment.read(name, [], {}), tmp_path / "new", runner)
    assert len(rows) == len(runner.asked) > 3
    assert all(row.status == "ok" for row in rows)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "mine.yaml: has no points to compare"),
        ("sweep: {params: {}}", "Experiments that have points: kv_quality, drafters"),
        ("sweep: {parms: {kv: native}}", "sweep.parms: no such setting. Did you mean 'params'?"),
        ("sweep: {metrics: kl}", "sweep.metrics: wants a list, got 'kl'."),
        ("sweep: {repeats: 0}", "sweep.repeats: wants 1 or more, got 0."),
        ("sweep: {cases: [\"drafter='a\"]}", "mine.yaml sweep.cases[0]: \"drafter='a\" cannot be read: No closing"),
        ("sweep: {cases: [drafter=none, {drafter: ngram}]}", "cases[1]: {'drafter': 'ngram'} is no text. Type it as"),
        ("sweep: {cases: [drafter=none, drafter]}", "[1]: 'drafter' cannot be read: 'drafter' is not an override."),
        ("sweep: {params: {drafter: none, ngram}}", "ngram: has no value. Several in {…} are quoted, as in"),
        ("sweep: {params: {kv: [native, kv8], depth.max: []}}", "depth.max: has no value."),
        ("sweep: {metrics: [{kl: 1}]}", "metrics: no metric '{'kl': 1}'."),
        ('sweep: {params: {depth.max: "interval(1,4)"}}', "depth.max: interval(1,4) names no single values."),
        ('sweep: {params: {kv: "native,kv8"}, metrics: [tokens_per_sec]}', "Did you mean 'tokens_per_s'?"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_experiment_is_said(tmp_path, body, text):
    with pytest.raises(ConfigError) as caught:
        experiment.read(recipe(tmp_path, body), [], {})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("depth.max=range(5,1)", "range(5,1) has no values: a range goes up to its end. Try: range(1,5)"),
        *((f"depth.max={raw}", f"depth.max: {raw} cannot be read as a sweep. Type 2,4 or choice(2,4)")
          for raw in ("range(2,9", "2,4,", "choice()", "range(1,5,0)", "1,choice(2,4)", "[2],[4")),
        ("model.name=choice(a,b", "one value that has a comma is quoted: 'a,b'"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_read_is_no_value(word, text):
    with pytest.raises(ConfigError) as caught:
        read("drafter=ngram,random", word)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "text", ["/a=b", "'a,b(c'", '{"type": "object", "required": ["a", "b"]}', "a(b"]
)
def test_texts_stay_texts(text):
    assert (
        read("kv=native,kv8", f"model.name={text}").points[0].overrides[-1] == f"model.name={text}"
    )


def test_a_lock_is_no_experiment(tmp_path):
    (tmp_path / "a.lock.yaml").write_text("lock: 2\n")
    with pytest.raises(ConfigError, match=r"is a lock, not a recipe\..* sweep its recipe"):
        points(str(tmp_path / "a.lock.yaml"), "kv=native")


def test_a_name_with_a_space_can_be_typed_as_it_is_printed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        points(file := recipe(tmp_path, "", "a b"))
    assert f"headrace sweep {shlex.quote(file)} kv=native,kv8." in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("json_valid", "'json_valid' (answers that are JSON). Add workload=json, or type: --metrics kl,top1"),
        ("left", "Add workload=mixed, or"),
        ("acceptance", "Add drafter=ngram, or"),
    ],
)  # fmt: skip
def test_a_metric_that_no_point_gives_is_named_before_anything_is_written(tmp_path, metric, text):
    wanted = read("drafter=none", "kv=native,kv8", metrics=["kl", metric, "top1", "kl"])
    with pytest.raises(ConfigError) as caught:
        run(wanted, tmp_path / "new", Runner())
    assert text in str(caught.value)
    assert not (tmp_path / "new").exists()
    file = recipe(tmp_path, f"sweep: {{params: {{kv: 'native,kv8'}}, metrics: [{metric}]}}")
    with pytest.raises(ConfigError, match=f"no point gives '{metric}'"):
        run(experiment.read(file, [], {}), tmp_path / "new", Runner())


def test_what_is_typed_over_an_experiment_may_leave_its_metrics_without_figures(tmp_path):
    wanted = experiment.read("drafters", ["drafter=none", "workload=chat,copy_edit"], {})
    rows = run(wanted, tmp_path / "new", Runner())
    assert "acceptance" in wanted.metrics and [row.status for row in rows] == ["ok", "ok"]


@pytest.mark.parametrize("said", ["", "kl,"])
def test_an_empty_metric_is_refused(said, capsys):
    assert main(["sweep", "fake", "kv=native,kv8", "--metrics", said]) == 2
    assert "no metric ''. Metrics: tokens_per_s," in capsys.readouterr().err


def test_the_tokens_that_were_scored_are_counted():
    job = Job("fake", (*FAKE, "kv=native", "model.context=50"), quality_tokens=99999)
    figures, tokens = quality(job)
    assert tokens == 48 and set(figures) == {"kl", "top1", "perplexity"}


def test_an_interrupted_sweep_goes_on_and_runs_no_point_twice(tmp_path):
    folder, first, second, third = tmp_path / "new", Runner(most=2), Runner(), Runner()
    with pytest.raises(KeyboardInterrupt):
        run(read("depth.max=1,2,3,4"), folder, first)
    rows = run(read("depth.max=1,2,3,4"), folder, second)
    assert [row.known for row in rows] == [True, True, False, False]
    assert [job.overrides[0] for job in (*first.asked, *second.asked)] == [
        "depth.max=1", "depth.max=2", "depth.max=3", "depth.max=4",
    ]  # fmt: skip
    # other points of the same experiment: what is known is not run again
    known, new = run(read("depth.max=2,5"), folder, third)
    assert (known.known, new.known) == (True, False)
    assert (
        known.when == json.loads((folder / "points" / f"{known.digest}.json").read_text())["when"]
    )
    assert known.when <= new.when != ""
    assert len(third.asked) == 1


def test_what_changes_a_result_makes_another_point(tmp_path):
    folder = tmp_path / "new"
    run(read("depth.max=1,2"), folder, Runner())
    for other in (
        read("depth.max=1,2", repeats=9),
        read("depth.max=1,2", "workload.seed=5"),
        read("depth.max=1,2", metrics=["kl"]),
    ):
        runner = Runner()
        run(other, folder, runner)
        assert len(runner.asked) == 2
    runner = Runner()
    run(read("depth.max=1,2", "server.port=9999", "server.keys=mine.yaml"), folder, runner)
    assert runner.asked == []
    elsewhere = RayRunner("10.0.0.1:6379", 2)
    runner.place = elsewhere.place
    assert elsewhere.place != RayRunner("10.0.0.1:6379", 4).place
    run(read("depth.max=1,2"), folder, runner)
    assert len(runner.asked) == 2, "what this machine measured says nothing of that one"
    runner = Runner()  # a round has more to do
    run(read("server.isolate=false,true", "telemetry.recount=false,true"), folder, runner)
    assert len(runner.asked) == 4


def test_no_secret_enters_what_a_sweep_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("WHO", "a-private-name")
    said = (
        "server.hosts=[${oc.env:WHO}]",
        "server.responses_folder=/tmp/${server.hosts.0}",  # there by way of another value
        "server.socket=${server.responses_folder}",
        "server.log=http://me:sesame@host",
        "depth.max=1,2,x",
    )
    wanted = read(*said, "model.name=hr-1234567890abcdef,plain")

    class Fails(Runner):
        def __call__(self, jobs):
            for index, job in enumerate(jobs):
                assert said[3] in job.overrides, "who measures is told all"
                if index == 0:
                    side = Checked.of(job.recipe, job.overrides).side("x", tmp_path)
                    made = {**contestant("kv=native", 10.0, 64.0, 0.0), "config": side.config}
                    yield index, {"status": "ok", "machine": machine(1), "contestants": [made]}
                    continue
                yield index, {"status": "failed", "reason": f"a-private-name: {job.overrides}"}

    def publish(folder, rows):
        report.publish(folder, wanted, rows, {"command": "", "date": ""})

    sweep.run(wanted, tmp_path / "new", Fails(), lambda row, of: None, publish)
    written = [path.read_text() for path in (tmp_path / "new").rglob("*.*") if path.is_file()]
    assert len(written) >= 3 + 4
    told = "".join(written)
    assert not [word for word in ("a-private-name", "sesame", "hr-123") if word in told]
    assert "server.log=???" in told and "server.hosts=[${oc.env:WHO}]" in told
    assert '"socket": "${server.responses_folder}"' in told


@pytest.fixture
def point(tmp_path):
    """The digest of one point, as things are."""
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(b"one")

    def digest():
        said = [f"model.path={weights}", "depth.max=1,2", f"adapters.folders.a={tmp_path / 'a'}"]
        wanted = experiment.read("local", ["adapters=lora", *said], {})
        return sweep._check(wanted, {})[0][0].digest

    return digest


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("packages", lambda: {"numpy": "9.9.9"}),
        ("cpu_name", lambda: "Z80"),
        ("_sources", lambda package, read: f"other {package}"),
    ],
)
def test_another_installation_or_machine_makes_another_point(point, monkeypatch, name, change):
    before = point()
    assert point() == before
    monkeypatch.setattr(facts, name, change)
    assert point() != before


def test_other_files_kernels_and_environment_make_another_point(point, tmp_path, monkeypatch):
    digests = [point()]
    stamp = (tmp_path / "model" / "model.safetensors").stat()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"two")
    digests.append(point())
    os.utime(
        tmp_path / "model" / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 9)
    )
    assert point() == digests[-1], "the bytes are the same"
    adapter = tmp_path / "a"
    adapter.mkdir()
    for file in ("adapter_config.json", "adapters.safetensors"):
        (adapter / file).write_text("{}")
    digests.append(point())
    (adapter / "adapters.safetensors").write_text("{1}")
    digests.append(point())
    build = tmp_path / "libscipy_openblas.so"
    build.write_bytes(Path(blas.scipy_openblas()).read_bytes() + b"another build")
    monkeypatch.setattr(blas, "scipy_openblas", lambda: str(build))
    digests.append(point())
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    digests.append(point())
    monkeypatch.setattr(os, "cpu_count", lambda: 99)
    digests.append(point())
    assert len(set(digests)) == 7


def test_code_of_somebody_is_of_a_points_identity_however_it_was_let_in(tmp_path, monkeypatch):
    code = tmp_path / "somebodys_depth.py"
    code.write_text("from stages.depth.fixed import Fixed\n\nclass Mine(Fixed):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = [*FAKE, "depth._target_=somebodys_depth.Mine", "depth.max=1,2"]

    def digest(*allow):
        return sweep._check(experiment.read("fake", said, {}, allow), {})[0][0].digest

    before = digest("somebodys_depth")
    monkeypatch.setenv("HEADRACE_ALLOW_CODE", "somebodys_depth")
    assert digest() == before
    code.write_text(code.read_text().replace("pass", "more = 1"))
    assert digest() != before and digest() == digest("somebodys_depth")


def test_a_failed_point_is_a_row_and_is_tried_again(tmp_path):
    folder = tmp_path / "new"
    rows = run(read("depth.max=1,2"), folder, Runner(bad=["depth.max=2"]))
    assert [row.status for row in rows] == ["ok", "failed"]
    assert rows[1].reason == "no room"
    wanted = read("depth.max=1,2", metrics=["kl"])
    (bad,) = (row for row in run(wanted, folder, Runner(bad=["depth.max=2"])) if row.status != "ok")
    assert " --kv native " in repeat(wanted, bad)[1], "of the other policies nobody has asked"
    again = Runner()
    assert [row.status for row in run(read("depth.max=1,2"), folder, again)] == ["ok", "ok"]
    assert len(again.asked) == 1


def test_a_point_that_does_not_fit_together_is_a_row_and_all_such_are_an_error(tmp_path):
    rows = run(read("depth.max=1,many"), tmp_path / "new", Runner())
    assert rows[1].reason.startswith("depth.max: wants a whole number")
    with pytest.raises(ConfigError, match=r"depth.maxx: depth=fixed takes no 'maxx'"):
        run(read("depth.maxx=1,2"), tmp_path / "other", Runner())
    assert not (tmp_path / "other").exists()


BITS = """defaults: [base, override flow: speculative, override kv: kv4, _self_]
kv: {bits: 2}
"""


def test_points_of_one_configuration_are_rows_that_say_so_and_run_once(tmp_path):
    file = tmp_path / "bits.yaml"
    file.write_text(BITS)
    wanted, runner, told = experiment.read(str(file), ["kv=native,kv8,kv4"], {}), Runner(), []
    rows = run(wanted, tmp_path / "new", runner, lambda row, of: told.append((row.number, of)))
    assert [row.status for row in rows] == ["failed", "ok", "ok"]
    assert rows[2].reason == "the same configuration as point 2"
    assert rows[2].figure("tokens_per_s") == rows[1].figure("tokens_per_s") is not None
    assert len(runner.asked) == 1 and told == [(1, 3), (2, 3), (3, 3)]
    for word in (
        "takes no 'bits'",
        "The recipe itself sets it, for every point",
        "sweep.cases",
    ):
        assert word in rows[0].reason
    again = run(wanted, tmp_path / "new", runner)
    assert [row.known for row in again] == [False, True, True] and len(runner.asked) == 1
    with pytest.raises(ConfigError, match="The recipe itself sets it"):
        run(experiment.read(str(file), ["kv=native,rotated"], {}), tmp_path / "none", Runner())
    bad = run(wanted, tmp_path / "bad", Runner(bad=["kv=kv8"]))
    assert [(row.status, row.reason) for row in bad[1:]] == [
        ("failed", "no room"),
        ("failed", rows[2].reason),
    ]


def test_what_was_typed_is_not_said_to_be_the_recipes(tmp_path):
    file = tmp_path / "bits.yaml"
    file.write_text(BITS.replace("{bits: 2}", "{group_size: 32}"))
    said = [*FAKE, "kv=kv8", "kv.group_size=x,y"]
    with pytest.raises(ConfigError, match=r"kv.group_size: wants") as caught:
        run(experiment.read(str(file), said, {}), tmp_path / "new", Runner())
    assert "The recipe itself" not in str(caught.value)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(
        FolderError, match=r"mine exists, and no run of ours made it. Choose another"
    ):
        run(read("depth.max=1,2"), mine, Runner())
    assert [file.name for file in mine.iterdir()] == ["notes.txt"]
    run(read("depth.max=1,2"), tmp_path / "new", Runner())
    other = recipe(tmp_path, 'sweep: {params: {limits.max_rows: "1,2"}}')
    with pytest.raises(FolderError, match="holds the sweep of fake"):
        run(experiment.read(other, [], {}), tmp_path / "new", Runner())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        FolderError, match=r"new cannot be written: Not a dir.* Choose another: --out"
    ):
        run(read("depth.max=1,2"), tmp_path / "file" / "new", Runner())


def test_a_run_that_takes_the_folder_meanwhile_hides_no_error(tmp_path, monkeypatch):
    unlink = Path.unlink

    def then_another_comes(path, **how):
        unlink(path, **how)
        if path.name == LOCK:
            path.touch()

    monkeypatch.setattr(Path, "unlink", then_another_comes)
    with pytest.raises(KeyError), own(tmp_path / "new", {"of": "x"}, again=False):
        raise KeyError
    assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK]


def test_two_runs_never_write_into_one_folder(tmp_path):
    folder = tmp_path / "new"
    run(read("depth.max=1,2"), folder, Runner())
    with FileLock(folder / LOCK), pytest.raises(FolderError, match="another run writes into"):
        run(read("depth.max=1,2,3"), folder, Runner())
    assert len(list((folder / "points").iterdir())) == 2


def test_nothing_half_written_stays(tmp_path):
    with pytest.raises(TypeError):
        write(tmp_path / "file", 3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        run(read("depth.max=1,2"), tmp_path / "new", Runner(most=0))
    assert not (tmp_path / "new").exists()
    with own(tmp_path / "new", {"of": "x"}, again=False):
        (tmp_path / "new" / "result.json").write_text("{}")
    assert (tmp_path / "new" / "result.json").exists()


def test_how_a_process_died_is_said():
    assert (
        parse("", -9, "loading\nKilled\n")["reason"]
        == "the process ended with signal 9: loading\nKilled"
    )
    assert parse('noise\n{"status": "ok"}\n', 0, "")["status"] == "ok"
    job = Job("fake", ("a=1",), ("mine",), 2, 64, "somewhere")
    assert Job.from_json(job.to_json()) == job


def test_relative_paths_begin_where_the_sweep_was_started(tmp_path, monkeypatch):
    """A cluster's workers run in folders of their own."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    recipe(here, "workload: {path: asked.jsonl, max_tokens: 4}")
    (here / "asked.jsonl").write_text('{"prompt": "hello"}\n')
    monkeypatch.chdir(here)
    said = [*FAKE, "workload=jsonl", "limits.max_rows=1,2"]
    runner = Runner()
    run(experiment.read("mine.yaml", said, {"repeats": 1}), tmp_path / "new", runner)
    monkeypatch.chdir(there)
    found = run_here(runner.asked[0].to_json())
    assert found["status"] == "ok", found


def command(out):
    words = ["fake", "depth.max=1,2,3", *FAKE, "workload.requests=1", "workload.max_tokens=8"]
    return [sys.executable, "-m", "pipeline", "sweep", *words, "--repeats", "1", "--out", str(out)]


def test_a_killed_sweep_repeats_nothing(tmp_path):
    """Really killed, with real processes; then gone on with."""
    out, root = tmp_path / "new", Path(package_folder("pipeline")).parent
    where = {"cwd": root, "env": {**os.environ, "PYTHONPATH": str(root), "SWEEP": str(out)}}
    process = subprocess.Popen(command(out), stderr=subprocess.PIPE, text=True, **where)
    assert process.stderr.readline().startswith("1 of 3  depth.max=1: ok")
    process.send_signal(signal.SIGKILL)
    process.wait()
    (known,) = (out / "points").glob("*.json")
    before = known.read_bytes()
    ended = subprocess.run(command(out), capture_output=True, text=True, **where)
    assert ended.returncode == 0, ended.stderr
    assert "1 of 3  depth.max=1: known from before" in ended.stderr
    assert "3 points, 0 failed, 1 known from before" in ended.stdout
    assert known.read_bytes() == before
    table = list(csv.DictReader((out / "results.csv").open()))
    assert [row["status"] for row in table] == ["ok"] * 3
    assert all(float(row["tokens_per_s"]) > 0 for row in table)
    assert json.loads((out / "results.json").read_text())["points"][2]["label"] == "depth.max=3"
    assert "<svg" in (out / "report.html").read_text()
    assert gone(f"SWEEP={out}")


def gone(mark):
    """The killed sweep's point has noticed, and has stopped its server."""
    for _ in range(300):
        if not any(mark in _environment(pid) for pid in Path("/proc").glob("[0-9]*")):
            return True
        time.sleep(0.1)
    return False


def _environment(pid):
    try:
        return (pid / "environ").read_text()
    except OSError:
        return ""


def test_failures_are_rows_and_the_exit_code_is_1(tmp_path, capsys):
    out = tmp_path / "new"
    words = [*command(out)[3:-4], "depth.max=1,many", "--repeats", "1", "--out", str(out)]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "2 points, 1 failed, 0 known from before" in said.out
    assert "2 of 2  depth.max=many: failed" in said.err, "numbered as in the table"
    assert "fake by depth.max" in said.out and "Goal" not in said.out
    assert "depth.max: wants a whole number, got 'many'." in (
        out / "report.html"
    ).read_text().replace("&#39;", "'")
