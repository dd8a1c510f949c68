"""From replies to figures, and who is measured. One recipe is really measured; no time is asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import serving, together

from pipeline.cli import main
from pipeline.errors import ConfigError
from pipeline.lab import children
from pipeline.lab.comparison import compare, same_answers, warm_up
from pipeline.lab.contestants import Contestant, threads_here
from pipeline.lab.driving import Pass, drive, less
from pipeline.lab.metrics import METRICS, figures, percentile, totals
from pipeline.lab.sides import Checked, against, rival
from pipeline.lab.sse import BenchError, Refused, Reply
from pipeline.lab.workload import Workload
from stages.device import Device


def reply(text="a b", times=(1.0, 1.5, 2.5), tokens=6, left=False):
    by_position = {"drafted_by_position": [2, 2], "accepted_by_position": [2, 1]}
    told = {"speculation": {"rounds": 3, "drafted": 4, "accepted": 3, **by_position}}
    return Reply(0.0, [text] * len(times), list(times), 3.0, 9, tokens, 2, "stop", told, left)


def passed(*replies, **more):
    counted = {
        "counts": {"drafted": 4, "accepted": 3},
        "stage_seconds": {"verify": 0.5},
        "widths": [{"rows": 1, "width": 3, "rounds": 2, "seconds": 0.2}],
        "kv": {"bytes_per_token": 128.0},
    }
    return Pass(list(replies), 2.0, counted, **{"forms": [False] * len(replies), **more})


def test_figures_of_passes():
    found = figures([passed(reply(), reply()), passed(reply(), peak_bytes=5_000_000)])
    assert found["tokens_per_s"]["samples"] == [6.0, 3.0]
    assert found["tokens_per_s"] | {"samples": 0} == {
        "median": 4.5,
        "low": 3,
        "high": 6,
        "samples": 0,
    }
    assert found["ttft_ms"]["median"] == 1000
    assert (found["gap_p50_ms"]["median"], found["gap_p99_ms"]["median"]) == (500, 1000)
    assert found["request_tokens_per_s"]["median"] == pytest.approx(5 / 1.5)
    assert found["acceptance"]["median"] == 0.75
    assert found["tokens_per_round"]["median"] == 2
    assert found["cached_tokens"]["samples"] == [4, 2]
    assert found["kv_bytes_per_token"]["median"] == 128
    assert found["peak_mb"]["samples"] == [5.0]
    assert "json_valid" not in found


def test_answers_that_should_have_a_form_are_read_as_json():
    done = passed(
        reply('{"a": 1', (1.0,)), reply('{"a": 1}', (1.0,)), reply("x"), forms=[True, True, False]
    )
    assert METRICS["json_valid"].of(done) == 0.5


def test_percentiles_are_of_the_nearest_rank():
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1)] == [50, 95, 99, 100]
    assert percentile([7.0], 0.99) == 7
    assert percentile([], 0.5) is None


def test_totals_are_over_all_passes():
    found = totals([passed(reply()), passed(reply(), reply())])
    assert found["drafted_by_position"] == [6, 6]
    assert found["accepted_by_position"] == [6, 3]
    assert found["stage_seconds"] == {"verify": 1.0}
    assert found["widths"] == [{"rows": 1, "width": 3, "rounds": 4, "seconds": 0.4}]


def test_what_the_server_counted_before_a_pass_is_not_the_pass():
    def told(rounds, seconds):
        return {
            "kv": {}, "counts": {"rounds": rounds}, "stage_seconds": {"verify": seconds},
            "widths": [{"rows": 1, "width": 1, "rounds": rounds, "seconds": seconds}],
        }  # fmt: skip

    found = less(told(5, 2.0), told(3, 1.5))
    assert (found["counts"], found["stage_seconds"]) == ({"rounds": 2}, {"verify": 0.5})
    assert found["widths"] == [{"rows": 1, "width": 1, "rounds": 2, "seconds": 0.5}]
    assert less({}, {}) == {}


def test_two_contestants_are_compared_pass_by_pass():
    ours, theirs = ([passed(reply()) for _ in range(5)] for _ in range(2))
    theirs[1].replies[0].texts[0] = "else"
    found = compare({"figures": figures(ours)}, {"figures": figures(theirs)})
    assert found["tokens_per_s"] == {"ratio": 1.0, "interval": [1.0, 1.0]}
    assert "prompt_tokens" not in found
    assert same_answers(ours, theirs) == [4, 5]
    few = compare({"figures": figures(ours[:4])}, {"figures": figures(theirs[:4])})
    assert few["tokens_per_s"] == {"ratio": 1.0}, "four pairs say nothing of 90 %"


def test_the_warm_up_is_short_unless_the_requests_are_always_the_same(tmp_path):
    assert len(warm_up(Workload(requests=9))) == 2
    assert len(warm_up(Workload(requests=9, clients=4))) == 4
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "x"}\n' * 7)
    assert len(warm_up(Workload(texts=["file"], path=str(file)))) == 7


def test_a_measurement_has_a_disk_tier_of_its_own(tmp_path):
    checked = Checked.of("fake", ["tier=[ram,disk]"])
    assert any(f"tier.disk.path={tmp_path}" in word for word in checked.side("a", tmp_path).command)
    named = Checked.of("fake", ["tier=[ram,disk]", "tier.disk.path=/else"])
    assert not any(str(tmp_path) in word for word in named.side("a", tmp_path).command)


@pytest.mark.parametrize(
    ("ours", "theirs", "threads"),
    [
        ([], "fake", (threads_here(), threads_here())),
        ([], "fake device.threads=3", (threads_here(), 3)),
        (["device.threads=3"], "fake", (3, 3)),
        (["device.threads=3"], "fake device.threads=4", (3, 4)),
    ],
)
def test_each_side_has_the_threads_that_it_sets(tmp_path, ours, theirs, threads):
    one = Checked.of("fake", ours)
    sides = (one.side("one", tmp_path), against(theirs, one).side("other", tmp_path))
    for side, count in zip(sides, threads, strict=True):
        assert side.threads == side.config["device"]["threads"] == count
        assert side.command[-1] == f"device.threads={count}"


def test_mlx_lm_has_the_threads_of_the_recipe(tmp_path):
    side = rival("mlx_lm", Checked.of("smollm2", ["device.threads=3"]), tmp_path)
    assert side.threads == 3 and side.command[-2:] == ("--threads", "3")


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["workload=json", "constraint=none"], "workload: asks for answers by a JSON schema"),
        (["flow=score", "drafter=none"], "flow: flow=score answers nothing"),
        (
            ["workload.requets=3"],
            "workload.requets: workload=chat takes no 'requets'. Did you mean 'workload.requests'?",
        ),
    ],
)
def test_a_recipe_that_cannot_be_measured_is_refused_before_anything_starts(overrides, text):
    with pytest.raises(ConfigError) as caught:
        Checked.of("fake", overrides)
    assert text in str(caught.value)


def test_who_mlx_lm_can_be_compared_with():
    assert against("mlx_lm", Checked.of("smollm2", [])) == "mlx_lm"
    assert against("fake depth.max=2", Checked.of("fake", [])).overrides == ("depth.max=2",)
    with pytest.raises(ConfigError, match="mlx-lm cannot load model=fake"):
        against("mlx_lm", Checked.of("fake", []))
    with pytest.raises(ConfigError, match="does not know the forms"):
        against("mlx_lm", Checked.of("smollm2", ["workload=json"]))


def test_both_sides_are_asked_the_recipes_workload(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("defaults: [base, override workload: json, _self_]\nworkload: {requests: 7}\n")
    ours = Checked.of("fake", ["workload=long_prompt", "workload.requests=3"])
    theirs = against(str(other), ours)
    one, two = ours.side("one", tmp_path), theirs.side("other", tmp_path)
    assert one.choices["workload"] == two.choices["workload"] == "long_prompt"
    assert one.config["workload"] == two.config["workload"] == theirs.config["workload"]
    assert theirs.workload.requests == two.config["workload"]["requests"] == 3


@pytest.mark.parametrize("word", ["workload=json", "workload.requests=3", "~workload.seed"])
def test_the_other_side_has_no_say_in_what_is_asked(word):
    told = f"--against: both sides are asked the recipe's workload: {word} would change nothing."
    with pytest.raises(ConfigError) as caught:
        against(f"fake constraint=llguidance {word}", Checked.of("fake", []))
    assert f"{told} Type it before --against." in str(caught.value)


def test_what_is_wrong_with_the_other_side_is_said_of_it():
    ours = Checked.of("fake", ["workload=json", "constraint=llguidance"])
    with pytest.raises(ConfigError, match="--against workload: asks for answers by a JSON schema"):
        against("fake", ours)


def test_bench_measures_two_recipes_by_turns_and_writes_what_it_found(
    tmp_path, capsys, monkeypatch
):
    out = tmp_path / "new"
    words = [
        "bench",
        "fake",
        "model.layers=2",
        "model.delay_ms=2",  # so that answers come in several pieces on a busy machine too
        "drafter=random",
        "workload=mixed",
        "workload.rate=null",
        "workload.requests=4",
        "server.host=0.0.0.0",  # it is measured without keys, on 127.0.0.1
        f"server.keys={tmp_path / 'keys.yaml'}",
        "server.hosts=[${oc.env:WHO}, sk-abcdefghij1234567890]",
    ]
    monkeypatch.setenv("WHO", "a-private-name")
    threads = threads_here() + 1
    other = (
        f"fake model.layers=2 device.threads={threads} model.delay_ms=2 drafter=none "
        "'server.log=http://me:sesame@host'"
    )
    code = main([*words, "--against", other, "--repeats", "2", "--out", str(out)])
    said = capsys.readouterr().out
    assert code == 0
    text = (out / "result.json").read_text()
    assert not [word for word in ("a-private-name", "sk-abc", "sesame") if word in text]
    found = json.loads(text)
    assert found["contestants"][0]["config"]["server"]["hosts"] == ["${oc.env:WHO}", "???"]
    assert "server.hosts=???" in found["command"] and "server.log=???" in found["command"]
    ours, theirs = found["contestants"]
    assert found["repeats"] == 2 and found["versions"]["headrace"]
    assert ours["choices"]["drafter"] == "random" and theirs["choices"]["drafter"] == "none"
    assert ours["config"]["model"]["layers"] == 2
    assert (ours["threads"], theirs["threads"]) == (threads - 1, threads)
    assert theirs["config"]["device"]["threads"] == threads
    device = Device()
    device.open()
    told = device.describe()
    assert ours["blas"] == theirs["blas"] == f"{told['blas']} {told['kernels']}".strip()
    for name in (
        "tokens_per_s",
        "ttft_ms",
        "gap_p99_ms",
        "acceptance",
        "kv_bytes_per_token",
        "cached_tokens",
    ):
        assert len(ours["figures"][name]["samples"]) == 2, name
    assert ours["stage_seconds"]["verify"] > 0
    assert sum(one["rounds"] for one in ours["widths"]) > 0
    same, of = found["same_answers"]
    assert same == of > 0, "a drafter changed an answer"
    assert "tokens a second in all" in said and f"the same text in {of} of {of} answers" in said
    assert said.count("too few pairs for an interval: --repeats 5") == 1 and "90 %" not in said
    again = main([*words, "--out", str(out)])
    assert again == 2
    assert f"{out} holds results already. Choose another (--out FOLDER)" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found on Linux only")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_of_a_bench_ends_with_it_however_it_ends(tmp_path, number):
    out = tmp_path / "new"
    words = ["bench", "fake", "model.layers=2", "--repeats", "9999", "--out", str(out)]
    command = [sys.executable, "-m", "pipeline", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as bench:
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
        until = time.monotonic() + 60
        while not (server := children.read_text().split()) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.3)
        bench.send_signal(number)
        assert bench.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    while Path("/proc", server[0]).exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert server and not Path("/proc", server[0]).exists()
    assert number == signal.SIGKILL or not out.exists()


def test_a_child_that_does_not_listen_is_made_to_end(monkeypatch):
    monkeypatch.setattr(children, "GRACE_S", -1.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    with children.Child(["-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"on\n"
        assert child.end() == -signal.SIGKILL
    with pytest.raises(BenchError, match=r"raise SystemExit.* failed: no"):
        children.output(["-c", "raise SystemExit('no')"])
    assert children.output(["-c", "import sys; print(*sys.argv)", "a"]) == "-c a\n"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read on Linux only")
def test_the_memory_of_a_servers_children_is_counted():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', {0!r}])"
    child = "x = b'1' * 100_000_000; import time; time.sleep(60)"
    one = Contestant("parent", ["-c", code.format(child)], 1)
    one.start()
    try:
        until = time.monotonic() + 30
        while (one.peak_bytes() or 0) < 100e6 and time.monotonic() < until:
            time.sleep(0.05)
        assert (one.peak_bytes() or 0) > 100e6
    finally:
        for place in one._processes()[1:]:
            os.kill(int(place.name), signal.SIGKILL)
        one.stop()


DIES = r"""
import os, socket
listener = socket.create_server(("127.0.0.1", {port}))
while True:
    connection, _ = listener.accept()
    asked = b""
    while not asked.endswith(b"}" if asked.startswith(b"POST") else b"\r\n\r\n"):
        asked += connection.recv(65536)
    if asked.startswith(b"POST"):
        connection.sendall(SAID)
        print("out of memory", flush=True)
        os._exit(1)
    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    connection.close()
"""
EVENT = b'data: {"choices": [{"text": "Hel"}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNK,
        b"HTTP/1.0 200 OK\r\n\r\n" + EVENT,  # as mlx-lm answers
        b"HTTP/1.0 200 OK\r\n\r\n" + EVENT[:20],
    ],
)
def test_a_server_that_dies_in_mid_answer_is_told_with_its_log(said):
    one = Contestant("fake", ["-c", DIES.replace("SAID", repr(said))], 1)
    one.start()
    try:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                one.get("/health")
            except Refused:
                break
            except BenchError:
                time.sleep(0.05)
        with pytest.raises(BenchError, match=r"fake: no whole answer: [^\n]+\nout of memory"):
            drive(one, Workload(requests=1).arrivals(0), 1)
    finally:
        one.stop()


def test_a_server_that_cannot_open_is_told_by_its_error_alone(tmp_path, capsys):
    words = ["tiny", "kv=kv8", "--repeats", "1", "--out", str(tmp_path / "new")]
    assert main(["bench", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "error: tiny: kv: tiny-llama: heads of 16 do not divide into groups of 64"
    )
    assert told.count("\n") == 1 and told.count("error: ") == 1


@pytest.mark.parametrize("other", ["", " ", "fake 'x"])
def test_who_it_is_measured_against_can_be_read(tmp_path, capsys, other):
    assert main(["bench", "fake", "--against", other, "--out", str(tmp_path / "new")]) == 2
    told = "--against: wants mlx_lm, mlx_lm_blas, or a recipe with its overrides, got "
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file/new", "x" * 300])
def test_where_nothing_can_be_written_is_told_before_anything_starts(tmp_path, capsys, name):
    (tmp_path / "file").touch()
    assert main(["bench", "fake", "--out", str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path / name} cannot be written: " in told and "--out FOLDER" in told


def test_bench_leaves_nothing_where_the_server_does_not_start(tmp_path, capsys):
    out = tmp_path / "new"
    assert main(["bench", "gguf", f"model.path={tmp_path / 'no.gguf'}", "--out", str(out)]) == 2
    assert "no.gguf" in capsys.readouterr().err
    assert not out.exists()


def test_rounds_are_counted_by_rows_and_width():
    with serving("drafter=random", "depth.max=3", "model.layers=2", recipe="fake") as engine:
        together(engine, ["one", "two"], max_tokens=12, ignore_eos=True)
        stats = engine.stats()
    assert sum(one["rounds"] for one in stats["widths"]) == stats["counts"]["rounds"]
    assert max(one["width"] for one in stats["widths"]) == 4
    assert {one["rows"] for one in stats["widths"]} <= {1, 2}
    assert all(one["seconds"] > 0 for one in stats["widths"])
