"""Tuning: what is better by enough and above the floor is chosen, and the recipe says what was meant."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.catalog import find_recipe
from pipeline.cli import main
from pipeline.cli.tune_verb import _told
from pipeline.compose import compose
from pipeline.errors import ConfigError, HeadraceError
from pipeline.lab.folder import FolderError
from pipeline.lab.metrics import spread
from pipeline.lab.sweep import owned
from pipeline.lab.tune import goals, recipe, search
from pipeline.lab.tune.goals import GOALS, KNOBS
from pipeline.lab.tune.search import Search, Wanted

# what a point takes, by the overrides that matter
SECONDS = {"drafter=ngram": 0.7, "drafter=suffix": 0.69, "depth.max=16": 0.9, "depth=adaptive": 0.8}
SECONDS |= {
    "kv=kv8": 0.95,
    "kv=kv4": 0.5,
    "kv=rotated": 1.1,
    "stage.chunked_prefill.chunk=1024": 0.99,
}
BYTES = {"kv=kv8": 28, "kv=turboquant": 22, "kv=kv4": 16, "kv=rotated": 16}
TOP1 = {"kv=kv8": 0.99, "kv=turboquant": 0.96, "kv=rotated": 0.94, "kv=kv4": 0.8}
REPEATS: dict[str, tuple[float, ...]] = {}  # of a policy, times its SECONDS; else all are near
KL = {"kv=kv8": 0.0003, "kv=turboquant": 0.02, "kv=rotated": 0.04, "kv=kv4": 0.08}


def figures(overrides):
    """The last one typed of each kind counts."""
    last = {text.partition("=")[0]: text for text in overrides}
    seconds = 1.0
    for text in last.values():
        seconds *= SECONDS.get(text, 1.0)
    kv = last.get("kv", "kv=native")
    found = {
        "seconds": spread([seconds * n for n in REPEATS.get(kv, (0.995, 1.0, 1.005))]),
        "tokens_per_s": spread([100 / seconds]),
        "kv_bytes_per_token": spread([BYTES.get(kv, 100)]),
        "top1": spread([TOP1.get(kv, 1.0)]),
        "kl": spread([KL.get(kv, 0.0)]),
    }
    return found


class Runner:
    place: Mapping[str, Any] = {}

    def __call__(self, jobs):
        for index, job in enumerate(jobs):
            if "kv=paged" in job.overrides:
                yield index, {"status": "failed", "reason": "no blocks today"}
            else:
                yield index, {"status": "ok", "contestants": [{"figures": figures(job.overrides)}]}


def tuned(tmp_path, goal, floor=0.95, overrides=("drafter=none",)):
    wanted = Wanted("smollm2", overrides, GOALS[goal], floor, 3)
    found = Search(wanted, tmp_path / goal, Runner(), lambda row, of: None)
    return found, list(found.steps())


def test_the_quickest_above_the_floor(tmp_path):
    found, steps = tuned(tmp_path, "latency")
    assert [step.chosen for step in steps] == [
        "kv=kv8", "flow=speculative drafter=ngram", "depth=adaptive", "", "",
    ]  # fmt: skip
    told = {v.row.label: v.why for step in steps for v in step.verdicts}
    assert told["kv=kv4"] == "below the floor: top-1 0.800 < 0.95"
    assert told["kv=paged"] == "refused: no blocks today"
    assert told["kv=rotated"].startswith("below the floor")
    assert told["flow=speculative drafter=suffix"].endswith("too little to count")
    assert steps[-1].left == goals.ONE
    assert compose("smollm2", found.overrides).choices["depth"] == "adaptive"


def test_one_lucky_repeat_is_no_gain(tmp_path, monkeypatch):
    """Quicker by the median and beyond every repeat of what was; its slowest is not quicker."""
    monkeypatch.setattr(search, "KNOBS", KNOBS[:1])
    for slowest, chosen in ((1.0, ""), (0.99, "kv=kv8")):
        monkeypatch.setitem(REPEATS, "kv=kv8", (0.7, 0.8, slowest / SECONDS["kv=kv8"]))
        _, (step,) = tuned(tmp_path / str(slowest), "latency")
        assert step.chosen == chosen
        told = {v.row.label: v.why for v in step.verdicts}
        assert told["kv=kv8"].endswith(
            "better than as it is" + ("" if chosen else ", within the spread")
        )


def test_later_knobs_are_held_against_what_was_chosen_so_far(tmp_path):
    _, steps = tuned(tmp_path, "latency")
    firsts = [step.verdicts[0] for step in steps if step.verdicts]
    assert [v.row.label for v in firsts] == ["as it is", *["as chosen so far"] * 3]
    assert {v.why for v in firsts} == {"what the others are compared with"}
    _, steps = tuned(tmp_path / "alone", "memory", floor=1.0)
    assert {step.verdicts[0].row.label for step in steps[:2]} == {"as it is"}, "nothing was chosen"


def test_the_fewest_bytes_and_another_floor(tmp_path):
    _, steps = tuned(tmp_path, "memory")
    assert steps[0].chosen == "kv=turboquant"
    _, steps = tuned(tmp_path / "low", "memory", floor=0.5)
    assert steps[0].chosen == "kv=rotated"  # the first of two with as few bytes
    found, steps = tuned(tmp_path / "one", "latency", floor=1.0, overrides=("kv=kv4",))
    assert steps[0].chosen == "kv=native", "what is below the floor cannot stay"
    assert "kv=native" in found.overrides
    assert _told(steps[0]).endswith("; the first above the floor")


def test_a_floor_of_one_lets_no_score_change(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "KNOBS", KNOBS[:1])
    monkeypatch.setitem(TOP1, "kv=kv8", 1.0)
    _, steps = tuned(tmp_path, "latency", floor=1.0)
    assert steps[0].chosen == ""
    told = {v.row.label: v.why for v in steps[0].verdicts}
    assert told["kv=kv8"] == "below the floor: KL 0.0003, and 1 allows none"
    assert tuned(tmp_path / "less", "latency", floor=0.99)[1][0].chosen == "kv=kv8"


def test_a_model_that_keeps_no_tokens_has_no_bytes_to_save(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "KNOBS", KNOBS[:1])
    for name in ("kv=native", *BYTES):
        monkeypatch.setitem(BYTES, name, 0)
    _, steps = tuned(tmp_path, "memory")
    assert steps[0].chosen == ""
    told = {v.row.label: v.why for v in steps[0].verdicts}
    assert told["kv=kv8"] == "no better than as it is: 0 B"


def test_where_nothing_can_be_chosen_each_reason_is_said(tmp_path, monkeypatch):
    knob = goals.Knob("kv", ("kv=kv8", "kv=paged"), quality=True)
    monkeypatch.setattr(search, "KNOBS", [knob])
    with pytest.raises(HeadraceError) as caught:
        tuned(tmp_path, "latency", floor=0.995, overrides=("kv=kv4",))
    assert str(caught.value).splitlines() == [
        "no kv can be chosen:",
        "  as it is: below the floor: top-1 0.800 < 0.995",
        "  kv=kv8: below the floor: top-1 0.990 < 0.995",
        "  kv=paged: refused: no blocks today",
    ]


def test_the_folder_is_its_own_from_the_first_knob_to_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "KNOBS", KNOBS[-2:])
    wanted = Wanted("smollm2", ("drafter=none",), GOALS["memory"], 0.95, 3)
    steps = Search(wanted, tmp_path / "x", Runner(), lambda row, of: None).steps()
    for _ in steps:
        with pytest.raises(FolderError, match="another run writes into"), ours(tmp_path / "x"):
            pass
    with ours(tmp_path / "x"):
        assert list((tmp_path / "x" / "points").iterdir())


def ours(folder):
    return owned(find_recipe("smollm2"), folder)


def test_depth_is_left_where_nobody_drafts(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "KNOBS", [knob for knob in KNOBS if knob.drafts])
    _, (step,) = tuned(tmp_path, "throughput")
    assert (step.left, step.verdicts) == ("nobody drafts", ())


def test_the_recipe_says_what_was_meant(tmp_path):
    meant = compose(
        "shared", ["kv=kv8", "kv.bits=6", "depth=adaptive", "limits.max_rows=3", "workload=json"]
    )
    path = tmp_path / "mine.yaml"
    recipe.write(path, recipe.text(meant, ["Goal: mine."]), meant)
    fresh = compose(str(path))
    same = {key: value for key, value in meant.config.items() if key != "workload"}
    assert {key: value for key, value in fresh.config.items() if key != "workload"} == same
    assert fresh.config["workload"] == compose("shared").config["workload"]
    assert path.read_text().startswith("# Goal: mine.\ndefaults:\n  - base\n")
    with pytest.raises(ConfigError, match="is there already"):
        recipe.write(path, "", meant)


def test_settings_of_the_option_that_is_left_do_not_go_along(tmp_path, monkeypatch):
    """`start` is known to all that code, `bits` not."""
    monkeypatch.setattr(search, "KNOBS", KNOBS[:1])
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [base, override kv: kv4, _self_]\nkv: {bits: 2, start: 32}\n")
    wanted = Wanted(str(mine), ("kv.group_size=32",), GOALS["memory"], 0.95, 3)
    found = Search(wanted, tmp_path / "run", Runner(), lambda row, of: None)
    (step,) = found.steps()
    whys = {v.row.label.split()[0]: v.why for v in step.verdicts}
    assert [name for name, why in whys.items() if why.startswith("refused")] == ["kv=paged"]
    assert whys["kv=paged"] == "refused: no blocks today"
    assert step.chosen == "kv=turboquant '~kv.bits' '~kv.group_size' kv.start=0"
    meant = compose(str(mine), found.overrides)
    assert meant.config["kv"] == compose(None, ["kv=turboquant"]).config["kv"]
    recipe.write(tmp_path / "new.yaml", recipe.text(meant, []), meant)
    assert main(["check", str(tmp_path / "new.yaml")]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kv=kv4"], ["kv=kv4"]),
        (["kv=kv8"], ["kv=kv8", "kv.bits=8"]),
        (["kv=native"], ["kv=native", "~kv.bits"]),
        (["depth=fixed", "depth.max=4"], ["depth=fixed", "depth.max=4", "~depth.min_p"]),
        (["depth=adaptive"], ["depth=adaptive", "depth.max=16", "~depth.min_p"]),
        (["flow=speculative", "drafter=none"], ["flow=speculative", "drafter=none", "~drafter.order"]),
        (["drafter=cascade"], ["drafter=cascade"]),
        (["limits.max_rows=2"], ["limits.max_rows=2"]),
    ],
)  # fmt: skip
def test_what_is_typed_to_get_another_option(tmp_path, words, said):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [base, override kv: kv4, override depth: confidence, override drafter: cascade, _self_]\n"
        "kv: {bits: 2}\ndepth: {max: 12, min_p: 0.2}\ndrafter: {order: [suffix]}\n"
    )
    assert search.moved(compose(str(mine)), words) == said


def test_a_recipe_repeats_what_overlays_say(tmp_path):
    """An overlay that it chose would win over what was tuned."""
    meant = compose("fake", ["debug=small", "limits.max_rows=4"])
    path = tmp_path / "mine.yaml"
    recipe.write(path, recipe.text(meant, []), meant)
    fresh = compose(str(path))
    assert (
        fresh.config["limits"] == meant.config["limits"] and fresh.config["limits"]["max_rows"] == 4
    )
    assert fresh.config["telemetry"]["trace"] is True


def test_a_recipe_that_would_not_be_found_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("drafter", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "drafter" / "sure.yaml").write_text(
        "_target_: stages.drafters.ngram.NGram\nmin_ngram: 2\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base, override flow: speculative, override drafter: cascade, _self_]\n"
        "drafter: {order: [sure, suffix]}\n"
    )
    words = ["tune", "mine.yaml", "--goal", "latency"]
    assert main([*words, "-o", "other/x.yaml"]) == 2
    said = capsys.readouterr().err
    assert (
        "other/x.yaml: a recipe there does not find drafter=sure, which lies beside yours." in said
    )
    assert f"Try: -o {tmp_path.resolve() / 'x.yaml'}" in said
    assert main([*words, "-o", f"{'x' * 300}.yaml"]) == 2
    assert "x.yaml: cannot be written: File name too long." in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() and not list((tmp_path / "other").iterdir())
    recipe.check(tmp_path / "x.yaml", compose("mine.yaml"))


def test_only_options_that_the_recipe_uses_have_to_be_found(tmp_path):
    """A file beside it may bear the name of any value of another group."""
    for group, name in (("kv", "fixed"), ("drafter", "sure"), ("tier", "sure"), ("model", "mine")):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text("_target_: stages.kv.native.Native\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults: [base, override drafter: cascade, override model@draft_model: mine, _self_]\n"
        "drafter: {order: [sure, suffix]}\nmodel: {name: fixed}\n"
    )
    assert recipe._beside(compose(str(mine))) == ["model=mine", "drafter=sure"]


def test_a_recipe_keeps_names_with_dots_and_what_was_set_to_nothing(tmp_path):
    (tmp_path / "given.yaml").write_text(
        "defaults: [base, override model: fake, override adapters: lora, _self_]\n"
        "adapters: {folders: {v1.2: /a, v1.3: /b}}\nmodel: {context: 512}\ndevice: {threads: null}\n"
    )
    meant = compose(str(tmp_path / "given.yaml"), ["adapters.folders={v1.4: /c}"])
    path = tmp_path / "mine.yaml"
    recipe.write(path, recipe.text(meant, []), meant)
    folders = compose(str(path)).config["adapters"]["folders"]
    assert folders == {"v1.2": "/a", "v1.3": "/b", "v1.4": "/c"}
    assert "threads: null" in path.read_text()


def test_a_recipe_keeps_no_secret_and_one_that_is_wrong_is_not_left(tmp_path, monkeypatch):
    monkeypatch.setenv("WHO", "a-private-name")
    meant = compose("fake", ["model.name=${oc.env:WHO}", "server.hosts=[sk-abcdefghij1234567890]"])
    path = tmp_path / "mine.yaml"
    recipe.write(path, recipe.text(meant, []), meant)
    assert "private" not in path.read_text() and "sk-abc" not in path.read_text()
    assert compose(str(path)).config["model"]["name"] == "a-private-name"
    with pytest.raises(ConfigError, match="a recipe extends base"):
        recipe.write(tmp_path / "bad.yaml", "defaults: []\n", meant)
    with pytest.raises(AssertionError, match="would not be what was tuned"):
        recipe.write(tmp_path / "bad.yaml", recipe.text(compose("fake"), []), meant)
    assert list(tmp_path.iterdir()) == [path]


def test_on_a_model_of_no_weights(tmp_path, monkeypatch, capsys):
    """The real thing, two candidates: measured in processes of their own, written, and right."""
    monkeypatch.chdir(tmp_path)
    knobs = [goals.Knob("rows", ("limits.max_rows=4", "limits.max_rows=16"))]
    monkeypatch.setattr(search, "KNOBS", knobs)
    typed = [
        "limits.max_rows=2",
        "model.delay_ms=6",
    ]  # what a busy machine adds is little beside it
    words = ["tune", "fake", *typed, "--goal", "throughput", "-o", "t.yaml"]
    assert main(words) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out.startswith("t.yaml: headrace serve t.yaml")
    assert "rows, by tokens_per_s" in err and "limits.max_rows=4: " in err
    text = (tmp_path / "t.yaml").read_text()
    assert (
        f"# Tuned by: headrace tune fake {' '.join(typed)} --goal throughput --floor 0.95 " in text
    )
    assert "max_rows: 16" in text and "# Goal: fake, tuned: as many tokens a second" in text
    assert main(["check", "t.yaml"]) == 0
    (command,) = [line for line in text.splitlines() if line.startswith("# Tuned by: headrace ")]
    assert main(shlex.split(command)[4:]) == 2, "it can be typed as it stands"
    assert "t.yaml: is there already. Take another name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--floor", "2", "-o", "x.yaml"], "--floor: wants a share from 0 to 1, got 2.0"),
        (
            ["--repeats", "2", "-o", "x.yaml"],
            "--repeats: wants 3 or more, got 2: fewer do not tell",
        ),
        (["-o", "x.lock.yaml"], "a recipe's name ends with .yaml"),
        (["-o", "no/x.yaml"], "there is no folder no"),
        (
            ["~model.seed", "-o", "x.yaml"],
            "~model.seed: a recipe cannot say that a setting is taken away",
        ),
    ],
)
def test_mistakes(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "fake", "--goal", "latency", *words]) == 2
    assert said in capsys.readouterr().err
