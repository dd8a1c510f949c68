"""The command line through `main(argv)`: exit codes, standard output and what is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.cli.arguments import VERBS, parse

ROOT = Path(__file__).parents[1]


@pytest.fixture
def cli(capsys):
    """Run a command; (exit code, standard output, standard error)."""

    def run(*words):
        code = main(list(words))
        return (code, *capsys.readouterr())

    return run


def test_check(cli):
    assert cli("check", "fake") == (0, "ok: 13 stages, 13 parts\n", "")


def test_check_names_all_faults(cli):
    code, out, err = cli("check", "smollm2", "kvv=kv8", "depth.maxx=3")
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "error: the configuration is not right, 2 problems:"
    assert lines[1].startswith("- kvv: no such group or setting. Did you mean 'kv'?")
    assert lines[2].startswith(
        "- depth.maxx: depth=fixed takes no 'maxx'. Did you mean 'depth.max'?"
    )


def test_graph_errors_are_told_apart(cli):
    code, _, err = cli("check", "fake", "flow=plain")
    assert code == 2
    assert err.splitlines()[0] == "error: the configuration does not fit together, 1 problem:"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["chek", "fake"], "no such verb: 'chek'. Did you mean 'check'?"),
        (["check"], "required: RECIPE. Try: headrace check --help"),
        (["check", "fake", "--jsn"], "unknown: --jsn"),
        (["generate", "fake", "--promt", "x"], "required: --prompt"),
        (["generate", "fake", "--prompt", "x", "--max-token=3"], "Did you mean '--max-tokens'?"),
        (["generate", "fake", "--prompt", "x", "--max-tokens", "-1"], "invalid count of tokens"),
        (["graph", "fake", "--format", "svg"], "invalid choice: 'svg'"),
        (["list", "drfter"], "drfter: no such group. Did you mean 'drafter'?"),
        (["list", "drafter", "x"], "unknown: x"),
        (["show", "nosuch"], "nosuch: no such recipe."),
        (["-x"], "unrecognized arguments: -x"),
        (["check", "fake", "--jsn"], "error: unknown: --jsn. Try: headrace check --help"),
        (["check", "fake", "--tracebak"], "Did you mean '--traceback'? Try: headrace check --help"),
        (["doctor", "smollm2"], "doctor looks at the machine, not at a recipe: 'smollm2'."),
        (["check", "fake", "debug.x=1"], "- debug: is an overlay of other groups' values"),
    ],
)
def test_mistakes_in_the_command_itself(cli, words, text):
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", VERBS)
def test_help(cli, verb):
    code, out, _ = cli(verb, "--help")
    assert code == 0
    assert f"headrace {verb}" in out
    assert ("RECIPE is a name" in out) == ("key=value" in out), (
        "of what it takes, and of nothing else"
    )


def test_help_of_all(cli):
    for words in ([], ["--help"]):
        code, out, _ = cli(*words)
        assert code == 0
        assert all(f"  {verb} " in out for verb in VERBS)


def test_list(cli):
    _, out, _ = cli("list")
    assert "  * auto                The best device of this machine" in out
    assert "    smollm2             Goal: a small real model" in out
    code, out, _ = cli("list", "drafter")
    assert code == 0
    assert "drafter=ngram\n  # Proposes" in out


def test_show_says_what_was_chosen_and_where_values_come_from(cli):
    code, out, _ = cli("show", "fake", "depth.max=3", "model.name=on")
    assert code == 0
    assert out.startswith("# fake: flow=speculative model=fake ")
    assert "\ndepth:\n  _target_: stages.depth.fixed.Fixed\n  max: 3  # command line\n" in out
    assert "\n  name: 'on'  # command line\n" in out
    assert "\ntier:\n  ram:\n    _target_: stages.tiers.ram.Ram\n    max_gb: 4.0\n" in out


def test_show_open_says_what_the_kv_policy_covers(cli):
    code, out, _ = cli(
        "show", "tiny", "model.family=falcon_h1", "model.head_size=64", "kv=kv8", "--open"
    )
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith("# tiny: flow=plain model=tiny ")
    assert lines[1:4] == [
        "kv=affine bits=8 group_size=64 start=0",
        "  covers 4 of 8 layers that keep state",
        "  keeps 4 as the model computes them: recurrent: one state of a fixed size, not one a token",
    ]
    # 4 layers x 2 heads x (keys + values) x (64 codes and a float32 scale and bias a group of 64)
    assert lines[4] == f"  {4 * 2 * 2 * (64 + 8):,} bytes a token, slack apart"
    assert "  estimate:" in lines and "  enforced: {}" in lines
    assert cli("show", "fake")[1].endswith("add --open, or see /stats\n")


def test_diff(cli):
    assert cli("diff", "fake", "fake")[1] == "fake -> fake\nno difference\n"
    _, out, _ = cli("diff", "fake", "depth.max=3")
    assert "  flow: plain -> speculative\n" in out
    assert "  depth.max: 8 -> 3\n" in out
    _, out, _ = cli("diff", "fake", "smollm2")
    assert out.startswith("fake -> smollm2\n")
    assert "  model: fake -> smollm2\n" in out


def test_graph(cli):
    assert "● verify" in cli("graph", "fake")[1]
    assert cli("graph", "fake", "--format", "mermaid")[1].startswith("flowchart TD\n")
    phases = json.loads(cli("graph", "fake", "--format", "json")[1])["phases"]
    assert list(phases) == ["admit", "prefill", "first", "decode", "finish", "idle"]


def test_generate(cli):
    code, text, _ = cli("generate", "fake", "--prompt", "hello", "--max-tokens", "5", "depth.max=2")
    assert code == 0
    code, out, _ = cli("generate", "fake", "--prompt", "hello", "--max-tokens", "5", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["text"] + "\n" == text
    assert set(answer) == {
        "text", "token_ids", "prompt_tokens", "completion_tokens", "cached_tokens",
        "resumed_tokens", "agreed_tokens", "finish_reason", "seed", "timings", "speculation",
    }  # fmt: skip
    assert set(answer["speculation"]) == {
        "rounds", "drafted", "accepted", "drafted_by_position", "accepted_by_position", "target_calls",
    }  # fmt: skip
    assert len(answer["token_ids"]) == 5


def test_version_and_recipes(cli):
    code, out, _ = cli("--version")
    assert code == 0 and out.startswith("headrace")
    code, out, _ = cli("list", "recipes")
    assert code == 0 and "\n    always_wrong        Goal: " in out


def test_a_warning_is_one_plain_line_once(cli, monkeypatch):
    import warnings

    def run(args):
        for _ in range(2):
            warnings.warn_explicit("slow", RuntimeWarning, "a.py", 1, registry={})
        return 0

    monkeypatch.setattr("pipeline.cli.check_verb.run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli("check", "fake") == (0, "", "warning: slow\n")


def test_generate_traces_rounds(cli):
    _, _, err = cli("generate", "fake", "telemetry=trace", "--prompt", "x", "--max-tokens", "2")
    assert "round 1: feed" in err
    assert "proposed" in err


def test_generate_refuses_what_the_engine_refuses(cli):
    code, _, err = cli("generate", "fake", "limits.context=8", "--prompt", "x" * 50)
    assert code == 2
    assert "\nerror: " in f"\n{err}"


def test_a_model_that_is_not_there(cli, tmp_path):
    code, _, err = cli("generate", "gguf", f"model.path={tmp_path}/no.gguf", "--prompt", "x")
    assert code == 2
    assert "\nerror: " in f"\n{err}"
    assert "no.gguf" in err


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            "drafter=none,ngram",
            "drafter: takes one option here. To compare them: headrace sweep … drafter=none,ngram",
        ),
        ("tier=ram,disk", "tier: wants a list of several options. Try: 'tier=[ram,disk]'"),
    ],
)
def test_several_options_where_one_is_wanted(cli, typed, told):
    code, _, err = cli("check", "fake", typed)
    assert code == 2
    assert told in err


@pytest.mark.parametrize("verb", ["sweep", "tune"])
def test_an_interrupted_run_says_that_it_goes_on(cli, monkeypatch, tmp_path, verb):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"pipeline.cli.{verb}_verb.run", interrupted)
    more = ["--goal", "latency", "-o", str(tmp_path / "x.yaml")] if verb == "tune" else []
    assert cli(verb, "fake", *more) == (
        130, "", "interrupted. The same command goes on from there.\n",
    )  # fmt: skip


def test_results_go_to_the_home_that_is_typed(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = parse(["bench", "fake", "--out=~/x"])
    assert args.out == tmp_path / "x"


@pytest.mark.parametrize(
    "words",
    [
        ("check", "~no-such-user/mine.yaml"),
        ("show", "local", "model.path=~no-such-user/model", "--open"),
        ("lock", "fake", "-o", "~no-such-user/mine.lock.yaml"),
        ("replay", "~no-such-user/mine.lock.yaml"),
        ("bench", "fake", "workload=jsonl", "workload.path=~no-such-user/asked.jsonl"),
    ],
)
def test_the_home_of_nobody_is_a_place_that_is_not_there(cli, words):
    code, _, err = cli(*words)
    assert code == 2
    assert "~no-such-user" in err and "our fault" not in err


def test_our_own_faults_say_so(cli, monkeypatch):
    monkeypatch.setattr("pipeline.cli.check_verb.run", lambda args: 1 / 0)
    code, _, err = cli("check", "fake")
    assert code == 1
    assert err == (
        "internal error, our fault: ZeroDivisionError: division by zero (--traceback shows where)\n"
    )
    assert "Traceback" in cli("check", "fake", "--traceback")[2]


def test_demo(cli):
    code, out, _ = cli("demo", "fake", "--max-tokens", "20")
    assert code == 0
    assert "● verify" in out
    assert "fake is ready at http://127.0.0.1:" in out
    assert "time per stage" in out
    assert "tokens a round" in out


def test_a_port_that_is_taken(cli):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, out, err = cli("serve", "fake", f"server.port={taken.getsockname()[1]}")
    assert code == 2
    assert re.search(r"in use\. Try: server\.port=[1-9]", err)
    assert "  decode   draft → verify → accept → detokenize → commit" in out


def _python(*words, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=env, cwd=ROOT.parent
    )


def test_doctor():
    done = _python("-m", "pipeline", "doctor", "device=cpu")
    assert "  blas " in done.stdout
    assert "  gflops " in done.stdout
    slow = done.returncode == 2 and "products are slow" in done.stderr
    assert slow or (done.returncode, done.stdout.splitlines()[-1]) == (0, "ok")


def test_as_a_module():
    done = _python("-m", "pipeline", "check", "fake")
    assert (done.returncode, done.stdout) == (0, "ok: 13 stages, 13 parts\n"), done.stderr


def test_what_check_put_off_still_works():
    code = (
        "from pipeline.cli import main\n"
        "assert main(['check', 'fake']) == 0\n"
        "assert main(['generate', 'fake', '--prompt', 'x', '--max-tokens', '3']) == 0\n"
    )
    done = _python("-W", "ignore", "-c", code)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "ok: 13 stages, 13 parts"), (
        done.stderr
    )


def test_check_imports_nothing_heavy():
    code = (
        "import sys; from pipeline.cli import main; main(['check', 'smollm2'])\n"
        "print([n for n in ('numpy._core', 'mlx_lm', 'transformers', 'tokenizers', 'gguf', 'rich', 'torch', "
        "'starlette', 'uvicorn') if n in sys.modules])"
    )
    assert _python("-c", code).stdout.splitlines()[-1] == "[]"


def test_debug_recounts_the_rows_after_each_round(monkeypatch):
    import pipeline

    calls = []
    with pipeline.load("tiny", "debug=small", "telemetry.trace=false") as engine:
        from stages.rows.rows import LayeredRows

        real = LayeredRows.check_integrity
        monkeypatch.setattr(
            LayeredRows, "check_integrity", lambda rows: (calls.append(1), real(rows))
        )
        answer = engine.generate("hello", max_tokens=6)
    assert len(calls) >= answer["speculation"]["rounds"] > 0
    assert answer["finish_reason"] in ("length", "stop")
