"""Recipes and overrides: what comes out, in which order, and what is said when it is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import initialize_config_dir

from pipeline.catalog import Catalog, package_folder
from pipeline.compose import compose, read
from pipeline.errors import ConfigError
from pipeline.plan import plan
from pipeline.signature import fit

HEAD = "defaults:\n  - base\n"


@pytest.fixture
def write(tmp_path):
    """Write a recipe of one's own and return its path."""

    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def said(*overrides, recipe="fake"):
    return [str(problem) for problem in compose(recipe, overrides).problems]


def planned(*overrides, recipe="fake"):
    return plan(compose(recipe, overrides)).config


def refused(*overrides, recipe="fake"):
    with pytest.raises(ConfigError) as caught:
        planned(*overrides, recipe=recipe)
    return [str(problem) for problem in caught.value.problems]


# --- finding


def test_by_name_by_folder_and_by_path(write, monkeypatch, tmp_path):
    path = write(HEAD + "  - override model: fake\nmodel: {name: mine}\n")
    assert compose("smollm2").choices["model"] == "smollm2"
    assert compose("serving/smollm2").recipe == "smollm2"
    assert compose(path).config["model"]["name"] == "mine"
    monkeypatch.chdir(tmp_path)
    assert compose("./mine.yaml").config["model"]["name"] == "mine"
    assert compose("mine.yaml").config["model"]["name"] == "mine"


def test_names_that_are_not_there():
    with pytest.raises(ConfigError, match=r"smolm2: no such recipe. Did you mean 'smollm2'\?"):
        compose("smolm2")
    with pytest.raises(ConfigError, match="no such recipe file"):
        compose("/nowhere/smollm2.yaml")


def test_odd_folders_and_file_names(write):
    for name in ("a b/c=d,e.v2.yaml", "it's/[x](y)%#.yaml", "é/ö.yaml"):
        path = write(HEAD + "  - _self_\ndepth: {max: 3}\n", name)
        assert compose(path).config["depth"]["max"] == 3


def test_options_beside_the_recipe(write):
    write("# Mine.\n_target_: stages.depth.fixed.Fixed\nmax: 11\n", "it's mine/depth/deep.yaml")
    path = write(HEAD + "  - override depth: deep\n", "it's mine/mine.yaml")
    assert compose(path).config["depth"]["max"] == 11


# --- the order of things


def test_groups_first_then_values_whatever_was_typed_first():
    one = compose("fake", ["sampler.temperature=0.5", "sampler=nucleus"]).config["sampler"]
    assert one == compose("fake", ["sampler=nucleus", "sampler.temperature=0.5"]).config["sampler"]
    assert one["temperature"] == 0.5


def test_overlays_win_over_the_recipe_and_the_command_line_over_all(write):
    path = write(HEAD + "  - override debug: small\n  - _self_\nlimits: {max_rows: 64}\n")
    composed = compose(path, ["limits.max_queue=9"])
    assert composed.config["limits"]["max_rows"] == 2
    assert composed.config["limits"]["max_queue"] == 9
    assert composed.sources["limits.max_rows"] == "debug=small"
    assert composed.sources["limits.max_queue"] == "command line"


def test_sources_and_choices():
    composed = compose("fake", ["drafter=none", "depth.max=2"])
    assert composed.choices["drafter"] == "none"
    assert composed.choices["flow"] == "speculative"
    assert composed.sources == {"depth.max": "command line"} | {
        k: v for k, v in composed.sources.items() if k != "depth.max"
    }


def test_tiers_are_a_list():
    assert compose("fake", ["tier=none"]).config["tier"] == {}
    assert compose("fake", ["tier=[]"]).config["tier"] == {}
    assert list(compose("fake", ["tier=[ram]"]).config["tier"]) == ["ram"]
    assert list(compose("fake", ["tier=ram"]).config["tier"]) == ["ram"]


def test_the_second_model_by_either_name():
    assert compose("fake", ["model@draft_model=fake"]).config["draft_model"]["name"] == "fake"
    assert compose("fake", ["draft_model=fake"]).config["draft_model"]["name"] == "fake"


def test_composing_inside_somebody_elses_hydra(tmp_path):
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("fake").recipe == "fake"


# --- what is wrong


def test_all_at_once_with_nearest_names():
    text = refused("kvv=kv8", "depth.maxx=3", recipe="smollm2")
    assert len(text) == 2
    assert text[0].startswith(
        "kvv: no such group or setting. Did you mean 'kv'? Groups: flow, model"
    )
    assert (
        text[1]
        == "depth.maxx: depth=fixed takes no 'maxx'. Did you mean 'depth.max'? It takes: max."
    )


def test_plus_is_no_way_around():
    text = refused("+kvv=kv8", "++depth.maxx=3", "+nothing.like.it=1")
    assert [line.split(":")[0] for line in text] == ["kvv", "nothing", "depth.maxx"]


def test_unknown_options_list_the_choices():
    names = ", ".join(Catalog(package_folder("conf")).options("drafter"))
    assert said("drafter=ngrm") == [
        f"drafter: has no option 'ngrm'. Did you mean 'ngram'? Options: {names}. "
        "Try: headrace list drafter"
    ]
    assert said("drafter=null") == [
        f"drafter: takes one of its options: {names}. Try: drafter=none"
    ]
    assert "takes one option here" in said("drafter=ngram,none")[0]
    assert "takes one of its options" in said("drafter=[ngram]")[0]
    assert said("~drafter") == ["~drafter: a group is never taken away. Try: drafter=none"]
    assert said("stage=draft")[0].startswith(
        "stage: is no choice: every stage's settings are there."
    )


def test_what_is_no_override():
    assert said("depth.max") == ["depth.max: is not an override. Type depth.max=VALUE."]
    assert said("drafter") == ["drafter: is not an override. Type drafter=VALUE."]
    assert said("depth..max=3") == [
        "depth..max=3: is not an override. Type key=value or group=option."
    ]


def test_values_under_values_and_removals():
    assert said("depth.max.x=3") == ["depth.max.x: depth.max is a value, not a group of settings."]
    assert "max" not in compose("fake", ["~depth.max"]).config["depth"]
    assert said("~depth.mx") == [
        "~depth.mx: there is nothing of this name to take away. Did you mean 'max'?"
    ]


def test_recipes_say_what_is_wrong_with_them(write):
    text = "defaults:\n  - base\n  - override kv: kv9\n  - override kvv: x\n  - drafter: ngram\n  - other\n"
    assert [p.split(":")[0] for p in said(recipe=write(text))] == [
        write(text) + " defaults", "kv", "kvv", write(text) + " defaults",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="a recipe extends base"):
        compose(write("depth: {max: 3}\n"))
    with pytest.raises(ConfigError, match="a recipe is a YAML mapping"):
        compose(write("- base\n"))
    with pytest.raises(ConfigError, match="the key 'depth' is there twice"):
        compose(write(HEAD + "depth: {max: 3}\ndepth: {max: 4}\n"))
    with pytest.raises(ConfigError, match="line 2"):
        compose(write("defaults: [base\nx: y: z\n"))
    assert said(recipe=write(HEAD + "dept: {max: 3}\n"))[0].startswith(
        "dept: no such group or setting. Did you mean 'depth'?"
    )


def test_missing_values_and_broken_references_are_all_listed(monkeypatch):
    monkeypatch.delenv("HEADRACE_TEST_PORT", raising=False)
    text = refused(
        "model=gguf", "stage.chunked_prefill.chunk=${nowhere.at_all}",
        "server.port=${oc.env:HEADRACE_TEST_PORT}", "limits.context=???",
    )  # fmt: skip
    assert text == [
        "model.path: must be set. Add model.path=VALUE",
        "limits.context: must be set. Add limits.context=VALUE",
        "limits.chunk: ${stage.chunked_prefill.chunk} leads nowhere: Interpolation key "
        "'nowhere.at_all' not found.",
        "server.port: the environment has no HEADRACE_TEST_PORT. Set it, or give a default: "
        "${oc.env:HEADRACE_TEST_PORT,DEFAULT}",
        "stage.chunked_prefill.chunk: ${nowhere.at_all} leads nowhere: Interpolation key "
        "'nowhere.at_all' not found.",
    ]


def test_parts_are_not_shared_by_reference():
    assert "is a whole part" in said("draft_model=none", "model.name=${draft_model}")[0]


# --- types


@pytest.mark.parametrize(
    "text",
    [
        "/m/epoch=3", "/m/a(1)", "/m/100%#1", "/m/é/模型", "a,b", "it's", 'say "hi"', "back\\",
        "", "null", "0123", "on", "1e3", "true", "3", "[a", "{x", "a: b", "a b", "~/m", "org/name:8b",
        "str(5)", "choice(1,2)", "glob(*)", "hf://x?y=z&w", "😀", "a\nb", "$HOME",
    ],
)  # fmt: skip
def test_text_arrives_byte_for_byte(text):
    value, typed = read(text)
    assert fit(value, str, typed) == text


def test_odd_texts_reach_their_settings():
    config = planned(
        "model=local", "model.path=/m/a=b(1),c%#é", "model.name=0123", "model.revision=on"
    )
    assert list(config["model"].values())[:4] == [
        "stages.models.local.Local",
        "/m/a=b(1),c%#é",
        "on",
        "0123",
    ]


def test_quotes_inside_still_work_and_null_is_none_where_it_may_be():
    assert planned("model.name='a,b'")["model"]["name"] == "a,b"
    assert planned("""model.name="it's [1]" """.strip())["model"]["name"] == "it's [1]"
    assert planned("model=gguf", "model.path=x", "model.name=null")["model"]["name"] is None
    assert planned("model=gguf", "model.path=x", "model.name='null'")["model"]["name"] == "null"


def test_yaml_that_is_no_text_is_refused_where_text_is_wanted(write):
    path = write(HEAD + "model: {name: on}\n")
    assert refused(recipe=path) == [
        "model.name: wants text, got true. Put it in quotes to make it text: 'true'."
    ]
    assert "got 1000.0" in refused(recipe=write(HEAD + "model: {name: 1e3}\n"))[0]
    assert planned(recipe=write(HEAD + "model: {name: 'on'}\n"))["model"]["name"] == "on"


def test_numbers_and_truth_values():
    assert refused("depth.max=lots", "depth.max=2.5", "telemetry.trace=3", "tier.ram.max_gb=x") == [
        "tier.ram.max_gb: wants a number, got 'x'.",
        "depth.max: wants a whole number, got 2.5.",
        "telemetry.trace: wants true or false, got 3.",
    ]
    assert refused("depth.max=true") == ["depth.max: wants a whole number, got true."]
    assert refused("depth.max='3'") == ["depth.max: wants a whole number, got '3'."]
    assert refused("depth.max=1,2") == ["depth.max: wants a whole number, got '1,2'."]
    assert refused("device.kind=gpu")[0].endswith("wants one of auto, cpu, metal, cuda, got 'gpu'.")
    assert planned("tier.ram.max_gb=2")["tier"]["ram"]["max_gb"] == 2.0


def test_environment_values_take_the_settings_type(monkeypatch):
    values = {
        "PORT": "9090",
        "FLAG": "false",
        "NAME": "6e12",
        "LIST": "[draft, verify]",
        "BAD": "eighty",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"HR_{name}", value)
    config = planned(
        "server.port=${oc.env:HR_PORT}", "telemetry.trace=${oc.env:HR_FLAG}",
        "model.name=${oc.env:HR_NAME}", "limits.context=${oc.env:HR_NONE,null}",
    )  # fmt: skip
    assert config["server"]["port"] == 9090
    assert config["telemetry"]["trace"] is False
    assert config["model"]["name"] == "6e12"
    assert config["limits"]["context"] is None
    assert refused("server.port=${oc.env:HR_BAD}") == [
        "server.port: wants a whole number, got 'eighty'."
    ]


def test_everything_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert compose("fake").config["model"]["name"] == "fake"
    assert os.listdir(tmp_path) == []


def test_base_is_complete_and_plain():
    assert planned(recipe=None)["flow"]["decode"] == ["verify", "accept", "detokenize", "commit"]
    assert Path(compose(None).recipe).name == "base"


def test_what_is_quoted_inside_is_literal():
    for text in ("${x}", "a${oc.env:HOME}/${depth.max}", "null"):
        assert planned(f'model.name="{text}"')["model"]["name"] == text
    assert planned("model.name=${rule._target_}")["model"]["name"] == "stages.rules.match.Match"
