"""Every recipe composes, checks, is drawn and answers; every option is used by some recipe."""

from __future__ import annotations

import re
import shlex

import pytest
from tiny_drafters import KINDS

import pipeline
from pipeline.build import build
from pipeline.catalog import Catalog, join_defaults, load_yaml, package_folder, recipes
from pipeline.compose import compose
from pipeline.drawing import as_text
from pipeline.lab import quality
from pipeline.lab.experiment import read
from pipeline.plan import plan

CATALOG = Catalog(package_folder("conf"))
RECIPES = [path for paths in recipes().values() for path in paths]
# What a recipe leaves to whoever starts it.
OWN = {"gguf": ["model.path=some.gguf"], "local": ["model.path=some_folder"]}
# What fits one model alone: the map of its layers, what is added to them.
OF_ITS_MODEL = {"per_layer": ["kv=native"], "adapters": ["adapters=none"]}
# Recipes whose drafter looks into the model: they need one with layers, and a drafter's folder.
HEADS = {"heads", *KINDS}
OWN |= {name: ["model.path=some_folder", "drafter.path=some_head"] for name in HEADS}
# Options for other machines, spellings of what `auto` chooses, what the verb cache chooses, a file of one's own.
ELSEWHERE = {"device": {"metal", "cuda"}, "flow": {"warm"}, "workload": {"jsonl"}}

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


@each_recipe
def test_composes_checks_and_is_drawn(path):
    composed = compose(str(path), OWN.get(path.stem, []))
    assert set(composed.config) == set(compose(None).config)
    built = build(plan(composed))
    drawing = as_text(built.graph)
    assert all(f"● {name}" in drawing for names in built.phases.values() for name in names)


@each_recipe
def test_fits_together_as_headrace_quality_runs_it(path, monkeypatch):
    monkeypatch.setattr(quality, "Engine", lambda built: built)  # not opened
    runs = quality._Runs(quality.chosen(str(path), OWN.get(path.stem, [])), "reference", print)
    assert runs._load(quality.NATIVE, "record", (*quality.OURS, "kv")).phases["prefill"]


@each_recipe
def test_answers_on_the_fake_model(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    second = "override model@draft_model" in join_defaults(load_yaml(path)["defaults"])
    others = ["draft_model=fake", "~draft_model.bits"] if second else []
    others += ["drafter=none"] if path.stem in HEADS else OF_ITS_MODEL.get(path.stem, [])
    with pipeline.load(str(path), "model=fake", *others, "debug=none", "telemetry=quiet") as engine:
        decodes = "decode" in engine.pipeline.phases
        answer = engine.generate("hello", max_tokens=10, prompt_logprobs=None if decodes else 1)
    assert len(answer["token_ids"]) == (10 if decodes else 0)
    assert len(answer.get("prompt_logprobs", ())) == (0 if decodes else answer["prompt_tokens"])
    assert answer["finish_reason"] == "length"


@each_recipe
def test_says_goal_command_three_things_to_try_and_what_was_run(path):
    head = [x for x in path.read_text().splitlines() if x.startswith("#")]
    text = "\n".join(head)
    assert head[0].startswith("# Goal: ")
    assert "Run on: " in text
    tries = text.split("Try:")[1].split("Run on:")[0]
    assert any(f"headrace {verb} {path.stem}" in text for verb in ("generate", "serve", "sweep"))
    assert tries.count("headrace ") == 3


FLAGS = {"--json", "--raw"}  # options without a value


def header_commands(path):
    """The overrides of each command in a recipe's header; of a sweep, those of its last point."""
    for line in path.read_text().splitlines():
        if found := re.match(
            r"#.* headrace (serve|generate|quality|bench|sweep|lock) (.*?)(?: +\(.*)?$", line
        ):
            words = shlex.split(found[2])
            after_flag = [w.startswith("-") and w not in FLAGS for w in ["", *words]]
            pairs = zip(words, after_flag, strict=False)
            name, *said = [w for w, is_value in pairs if not is_value and not w.startswith("-")]
            if name.endswith(".lock.yaml"):
                continue  # test_lock.py
            assert name == path.stem
            yield read(str(path), said, {}).points[-1].overrides if found[1] == "sweep" else said


@each_recipe
def test_every_command_of_its_header_is_right(path):
    commands = list(header_commands(path))
    assert commands
    for overrides in commands:
        own = [] if any("path=" in word for word in overrides) else OWN.get(path.stem, [])
        assert plan(compose(str(path), [*own, *overrides])).parts


def swept(path):
    """Everything that the points of an experiment choose."""
    points = read(str(path), [], {}).points if "sweep" in load_yaml(path) else ()
    return [word for point in points for word in point.overrides]


def test_every_option_is_used():
    base = {
        key: value if isinstance(value, list) else [value]
        for key, value in CATALOG.base_choices().items()
    }
    used = {key: set(names) for key, names in base.items()}
    for path in RECIPES:
        for key, option in join_defaults(load_yaml(path)["defaults"]).items():
            names = option if isinstance(option, list) else [option]
            used[key.removeprefix("override ")] |= set(names)
        for word in swept(path):
            key, _, option = word.partition("=")
            used.get(key, set()).add(option)
    for group in base:
        if "@" not in group:
            unused = set(CATALOG.options(group)) - used[group] - ELSEWHERE.get(group, set())
            assert unused <= ({"none"} if group == "model" else set()), group
