"""Rows that wear different adapters in one batch: each as alone, whatever drafts, is kept, or is exchanged."""

from __future__ import annotations

import pytest
from adapter_folders import opened, written
from support import CONFIGS, Running, prompt_ids, serving

from tests.lossless.test_drafters import settings

PROMPT = prompt_ids(40)
WANTED = {"max_tokens": 20, "ignore_eos": True}
ASKED = ["none", "a", "b", "wide", "a+wide", "dora", "b+a"]
HOW = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "nemotron_h"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folders(family, tmp_path_factory):
    return written(tmp_path_factory.mktemp("adapters"), family)


def answer(engine, adapter, **more):
    return engine.generate(PROMPT, **WANTED, **more, adapter=adapter)


@pytest.fixture(scope="module")
def alone(family, folders):
    with opened(family, folders, "flow=plain", "drafter=none", "tier=none") as engine:
        found = {
            (name, at): answer(engine, name, **how)["token_ids"]
            for name in ASKED
            for at, how in enumerate(HOW)
        }
    assert len(set(map(tuple, found.values()))) == len(found), "they all say something else"
    return found


@pytest.fixture(scope="module", params=CONFIGS)
def engine(request, family, folders, alone):
    with opened(
        family, folders, "tier=none", "limits.max_rows=16", *CONFIGS[request.param]
    ) as made:
        made.pipeline.parts["drafter"].book = [PROMPT + ids for ids in alone.values()]
        yield made


def test_rows_that_wear_different_adapters_equal_each_alone(engine, alone):
    runs = {
        (name, at): Running(engine, PROMPT, **WANTED, **HOW[at], adapter=name) for name, at in alone
    }
    assert {key: run.result()["token_ids"] for key, run in runs.items()} == alone


def test_rows_without_adapters_are_those_of_an_engine_without_any(family, alone):
    with serving(f"model.family={family}", "flow=plain", "drafter=none", "tier=none") as bare:
        for at, how in enumerate(HOW):
            ids = bare.generate(PROMPT, **WANTED, **how)["token_ids"]
            assert ids == alone["none", at]


def test_a_fault_is_mended_with_what_each_row_wears(engine, alone, monkeypatch):
    stage = engine.pipeline.stages["verify"]
    run, calls = type(stage).run, []

    def faulty(batch):
        calls.append(1)
        run(stage, batch)
        if len(calls) in (3, 9):
            raise RuntimeError("out of memory, say")

    monkeypatch.setattr(stage, "run", faulty)
    runs = {name: Running(engine, PROMPT, **WANTED, **HOW[0], adapter=name) for name in ASKED}
    assert [run.result()["token_ids"] for run in runs.values()] == [alone[n, 0] for n in ASKED]


def test_saved_states_serve_their_own_adapter_alone(family, folders, alone):
    """Warm == cold; ids of equal content share, and nobody else does."""
    with opened(family, folders, "flow=plain", "drafter=none", "tier=ram") as engine:
        for name in ("a", "none", "a+wide", "b+a"):
            assert answer(engine, name, **HOW[0])["cached_tokens"] == 0, name
            again = answer(engine, name, **HOW[0])
            assert again["token_ids"] == alone[name, 0]
            assert again["cached_tokens"] == len(PROMPT) - 1
        twin = answer(engine, "twin", **HOW[0])
        assert (twin["token_ids"], twin["cached_tokens"]) == (alone["a", 0], len(PROMPT) - 1)
        engine.adapters.mount("half", folders["a"], scale=0.5)
        assert answer(engine, "half", **HOW[0])["cached_tokens"] == 0
        assert answer(engine, "wide+a", **HOW[0])["cached_tokens"] == 0


def test_choices_of_one_prompt_are_prefilled_once(family, folders, alone):
    """Those that come too late find its saved state."""
    with opened(family, folders, "flow=plain", "drafter=none", "tier=ram") as engine:
        runs = [Running(engine, PROMPT, **WANTED, **HOW[0], adapter="a", group="g") for _ in "123"]
        found = [run.result() for run in runs]
    assert [each["token_ids"] for each in found] == [alone["a", 0]] * 3
    assert sorted(each["cached_tokens"] for each in found)[1:] == [len(PROMPT) - 1] * 2


PAIRS = [("eagle3", "dense"), ("mtp", "hybrid"), ("assistant", "sliding"), ("two_model", "dense")]
PAIRS += [("mixed", "dense")]  # a cascade of a head and of ngram, which can follow


@pytest.mark.parametrize(("drafter", "layers"), PAIRS)
def test_a_drafter_that_cannot_follow_leaves_out_that_row_alone(drafter, layers, tmp_path):
    model, *drafts = settings(drafter, layers, tmp_path)
    drafts += ["drafter.ngram.min_ngram=1"] * (drafter == "mixed")
    mounted = written(tmp_path / "adapters", model.partition("=")[2])
    family, options = model.partition("=")[2], ("tier=none", "depth.max=3")
    with opened(family, mounted, *options, "flow=plain", "drafter=none") as plain:
        truth = [answer(plain, name, **HOW[0])["token_ids"] for name in ("none", "a")]
    with opened(family, mounted, *options, "flow=speculative", *drafts) as engine:
        runs = [Running(engine, PROMPT, **WANTED, **HOW[0], adapter=n) for n in ("none", "a")]
        bare, worn = (run.result() for run in runs)
        follows = "adapters" in engine.pipeline.parts["drafter"].can
        faults = engine.stats()["counts"].get("draft_faults", 0)
    assert [bare["token_ids"], worn["token_ids"]] == truth
    assert bare["speculation"]["drafted"] > 0
    assert (worn["speculation"]["drafted"] > 0) == follows == (drafter in ("two_model", "mixed"))
    assert faults == 0


def test_a_restart_goes_on_from_states_of_the_same_content(tmp_path):
    """Answers under way and finished ones, found again under another id."""
    mounted = written(tmp_path / "adapters")
    disk = ("tier=[ram,disk]", f"tier.disk.path={tmp_path / 'saved'}", "tier.disk.reserve_gb=0")
    flow = ("flow=resumable", "drafter=ngram", *disk)
    with opened("llama", {"a": mounted["a"], "b": mounted["b"]}, *flow) as engine:
        first = answer(engine, "a", **HOW[0])["token_ids"]
        assert engine.flush()["durable"]
    with opened("llama", {"other": mounted["a"], "a": mounted["b"]}, *flow) as engine:
        again = answer(engine, "other", **HOW[0])
        assert again["token_ids"] == first
        assert again["cached_tokens"] >= len(PROMPT) - 1
        exchanged = answer(engine, "a", **HOW[0])
        assert (exchanged["cached_tokens"], exchanged["resumed_tokens"]) == (0, 0)
        assert exchanged["token_ids"] != first
