"""`headrace quality`: what it runs, what it prints, and what it refuses."""

from __future__ import annotations

import json
import math

import lab_rows
import pytest

from pipeline.cli import main
from pipeline.lab import quality
from pipeline.lab.tables import repeat
from pipeline.lab.texts import read

FEW = ("--tokens", "200")


@pytest.fixture
def cli(capsys):
    def run(*words):
        code = main(["quality", *words])
        return (code, *capsys.readouterr())

    return run


def test_native_against_itself_is_zero_and_says_so(cli):
    code, out, err = cli("tiny", "kv=native", *FEW)
    assert code == 0 and "kv=native: the reference" in err
    assert "kv=native is the reference itself: all its differences are zero." in out
    rows = [line.split("|") for line in out.splitlines() if line.startswith("|")][2:]
    contexts = [cells[3].strip() for cells in rows]
    assert contexts == ["1-128", "129-200", "all"]
    assert {cells[4].strip() for cells in rows} == {"0"}
    assert {cells[5].strip() for cells in rows} == {"100.0%"}
    assert all(cells[6].strip() == cells[7].strip() for cells in rows)


def test_json_holds_every_line_and_the_perplexity_is_the_models(cli, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once there was a mill. " * 4)
    code, out, _ = cli("tiny", "--kv", "native", "--text", str(text), "--json")
    report = json.loads(out)
    (outcome,) = report["outcomes"]
    assert code == 0 and outcome["policy"] == "kv=native" and outcome["bytes_per_token"] > 0
    assert report["tokens"] == outcome["whole"]["tokens"] + 1
    assert [line["low"] for line in outcome["lines"]] == [0]
    import pipeline

    with pipeline.load("tiny") as engine:
        ids = engine.tokenizer.encode(text.read_text())
        scored = engine.generate(ids, max_tokens=0, prompt_logprobs=0)["prompt_logprobs"][1:]
    mean = sum(entry["logprob"] for entry in scored) / len(scored)
    assert outcome["whole"]["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)


def test_which_policies_are_compared():
    options = quality.Catalog(quality.package_folder("conf")).options("kv")
    every = {f"kv={name}" for name in options if name != "native"} or {"kv=native"}
    assert set(quality.asked("tiny", [], []).policies) == every
    assert quality.asked("tiny", ["kv=native"], []).policies == {"kv=native": ("kv=native",)}
    some = quality.asked("tiny", ["limits.max_rows=2", "drafter=ngram"], ["native"])
    assert some.policies == {"kv=native": ("kv=native",)} and some.named
    assert some.overrides == ("limits.max_rows=2",)


def test_a_recipes_own_drafter_and_tier_do_not_disturb(cli, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults:\n"
        "  - base\n"
        "  - override flow: speculative\n"
        "  - override model: tiny\n"
        "  - override model@draft_model: tiny\n"
        "  - override drafter: cascade\n"
        "  - override tier: [disk]\n"
        "  - _self_\n"
        "draft_model: {layers: 1}\n"
        "drafter: {order: [ngram, two_model], ngram: {min_ngram: 2}}\n"
        "tier: {disk: {max_gb: 1.0}}\n"
        "flow: {decode: [draft, verify, accept, detokenize, commit]}\n"
    )
    assert main(["check", str(recipe)]) == 0
    code, out, err = cli(str(recipe), "kv=native", "--tokens", "20")
    assert code == 0 and "| 1-20 " in out, err


def test_the_chosen_policy_is_scored_with_the_recipes_own_settings(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "own.yaml").write_text(
        "# Mine.\n_target_: stages.kv.affine.Affine\nbits: 4\n"
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [base, override model: tiny, override kv: own, _self_]\n"
        "model: {head_size: 64}\nkv: {bits: 2}\n"
    )
    found = {}
    for bits, named in (("recipe's", []), ("option's", ["own"])):
        report = quality.measure(quality.asked(str(recipe), [], named), read("mill"), [64])
        (found[bits],) = report["outcomes"]
    two, four = found["recipe's"], found["option's"]
    assert (two.policy, four.policy) == ("kv=own kv.bits=2", "kv=own")
    assert two.bytes_per_token < four.bytes_per_token and two.whole.kl > four.whole.kl > 0


@pytest.mark.parametrize(
    ("typed", "label"),
    [
        ([], "kv=kv4 kv.bits=2"),
        (["kv.bits=8", "kv.start=32"], "kv=kv4 kv.bits=8 kv.start=32"),
        (["kv=kv8", "drafter=ngram", "depth.max=3"], "kv=kv8 kv.bits=2"),
        (["kv=native", "~kv.bits"], "kv=native ~kv.bits"),
    ],
)
def test_a_policy_is_named_with_what_is_set_of_it(tmp_path, typed, label):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [base, override kv: kv4, _self_]\nkv: {bits: 2}\n")
    asked = quality.asked(str(recipe), typed, [])
    assert list(asked.policies) == [label] and not asked.overrides


def test_a_policy_of_a_recipes_own_class_is_not_native(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [base, _self_]\nkv: {_target_: stages.kv.affine.Affine}\n")
    asked = quality.asked(str(recipe), [], [])
    assert list(asked.policies) == ["kv=native kv._target_=stages.kv.affine.Affine"]


def test_the_command_of_a_point_measures_its_own_policy_only():
    wanted, row = lab_rows.experiment(), lab_rows.rows()[0]
    row.overrides = ("drafter=suffix",)
    assert (
        repeat(wanted, row)[1]
        == "headrace quality kv_quality drafter=suffix --kv native --tokens 512"
    )
    row.overrides = ("kv=native",)
    assert repeat(wanted, row)[1] == "headrace quality kv_quality kv=native --tokens 512"
    row.overrides, row.kv = ("drafter=suffix",), "kv=kv4"  # the recipe's
    assert repeat(wanted, row)[1] == "headrace quality kv_quality drafter=suffix --tokens 512"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["tiny", "--kv", "nosuch"], "kv: has no option 'nosuch'"),
        (["tiny", "kv.bits=8", "--kv", "kv4"], "Try: kv=kv4 kv.SETTING=VALUE"),
        (["tiny", "kv=kv8", "--kv", "kv4,kv8"], "--kv: scores policies as they are listed"),
        (["tiny", "--text", "/no/such/file"], "--text: /no/such/file cannot be read"),
        (["tiny", "--tokens", "0"], "--tokens: wants a whole number, 1 or more, got '0'"),
        (["tiny", "--text", "{empty}"], "{empty} is empty: there is nothing to score"),
        (
            ["tiny", "model.context=2", "--text", "{short}"],
            "--text: {short}: at least 2 tokens can be",
        ),
        (["tiny", "--kv", ","], "--kv: names no policy, got ','"),
        (["tiny", "--kv", "native,kv88,kv9"], "kv: has no option 'kv88'. Did you mean 'kv8'?"),
        (["tiny", "--kv", "native,kv88,kv9"], "kv: has no option 'kv9'."),
        (
            ["tiny", "kv=kv4", "kv.bitz=3"],
            "kv.bitz: kv=kv4 takes no 'bitz'. Did you mean 'kv.bits'?",
        ),
    ],
)
def test_mistakes_are_the_users_and_known_before_anything_is_scored(cli, tmp_path, words, text):
    files = {name: str(tmp_path / f"{name}.txt") for name in ("empty", "short")}
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a")
    code, _, err = cli(*[word.format(**files) for word in words])
    assert code == 2 and text.format(**files) in err
    assert "the reference" not in err


def test_a_policy_that_the_model_cannot_use_scores_no_tokens_and_has_no_bytes(cli):
    """Heads of 16 have no groups of 64."""
    code, out, err = cli("tiny", "--tokens", "8", "--json")
    outcomes = {one["policy"]: one for one in json.loads(out)["outcomes"]}
    refused = [name for name, one in outcomes.items() if one["refused"]]
    assert code == 0 and "kv=kv4" in refused and "kv=paged" not in refused
    assert {outcomes[name]["bytes_per_token"] for name in refused} == {None}
    told = [f"{name}: {'cannot be used' if name in refused else '9 tokens'}" for name in outcomes]
    assert err.splitlines() == ["kv=native: the reference", *told]


def test_our_text_is_long_enough_for_every_length():
    assert len((read("survey") + read("mill")).split()) > 0.6 * max(quality.LENGTHS)


@pytest.mark.real
def test_what_coded_policies_cost_on_a_real_model():
    """Promised: KL of kv8 at most 0.01, of kv4 at most 0.3, k8v3 between them."""
    names = ("kv8", "turboquant", "per_layer", "rotated", "kv4")
    asked = quality.asked("smollm2", [], names)
    text = "\n\n".join(map(read, ("survey", "mill")))
    outcomes = quality.measure(asked, text, (32, 128), print)["outcomes"]
    eight, k8v3, mapped, rotated, four = outcomes
    assert 0 < eight.whole.kl <= 0.01 < four.whole.kl <= 0.3
    for between in (k8v3, mapped, rotated):
        assert eight.whole.kl < between.whole.kl < four.whole.kl
    assert eight.whole.top1 >= 0.97 and 0.7 <= four.whole.top1 < 1
    assert eight.whole.native_perplexity == pytest.approx(four.whole.native_perplexity)
    assert eight.whole.perplexity == pytest.approx(eight.whole.native_perplexity, rel=0.01)
    assert all(line.kl <= 0.3 for line in (*eight.lines, *four.lines))
    assert eight.bytes_per_token > four.bytes_per_token
