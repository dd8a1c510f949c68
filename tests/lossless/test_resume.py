"""Resumed == uninterrupted: tokens, text, log-probabilities and seed, whatever decodes, stores or constrains.

The crash is a copy of the folder, made in mid-answer; the answer it was copied from goes on to its end
and is what the resumed one is compared with. KV policies and drafters join from disk.
"""

from __future__ import annotations

import shutil

import pytest
from support import ORACLE, Running, prompt_ids, serving
from tiny_drafters import FAMILIES

from pipeline.catalog import Catalog, package_folder
from pipeline.types import Delta
from tests.lossless.test_drafters import pairs, settings

EVERY, CUT, LENGTH, DEPTH = 12, 31, 44, 3
PROMPT = (prompt_ids(7) * 6)[:40]
ASKED = {"max_tokens": LENGTH, "ignore_eos": True}
WANTED = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},  # the server chooses the seed
    "everything": {
        "temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
        "logprobs": 2, "stop": ("~~~~",),
    },
}  # fmt: skip
PLAIN = ("drafter=none",)
WRONG = (ORACLE, "+drafter.wrong_every=2", f"depth.max={DEPTH}")
FORM = {"grammar": {"regex": "[a-z ]{20,200}"}}
TURNS = list(WANTED)


def cases():
    """name, (options, sampling, more): layers x how it decodes; each KV policy; each drafter once, with
    layers that it goes with."""
    for at, layers in enumerate(FAMILIES):
        for step, (name, drafter) in enumerate((("plain", PLAIN), ("wrong", WRONG))):
            for how in (TURNS[(at + step) % 3], TURNS[(at + step + 1) % 3]):
                yield f"{layers}-{name}-{how}", ((family(layers), *drafter), how, {})
    for at, kv in enumerate(Catalog(package_folder("conf")).options("kv")):
        if kv not in ("native", "per_layer"):  # per_layer names a model's own layers
            head = (family("dense"), "model.head_size=64", f"kv={kv}")
            yield f"kv-{kv}", ((*head, *(PLAIN, WRONG)[at % 2]), TURNS[at % 3], {})
    for at, (drafter, layers) in enumerate(dict(reversed(pairs())).items()):
        yield f"drafter-{drafter}", (f"{drafter}:{layers}", TURNS[at % 3], {})
    yield "sliding-paged", ((family("sliding"), "kv=paged", *PLAIN), "everything", {})
    for name, drafter in (("plain", PLAIN), ("wrong", WRONG)):
        options = (family("dense"), "constraint=llguidance", *drafter)
        yield f"form-{name}", (options, "everything", FORM)


def family(layers):
    return f"model.family={FAMILIES[layers]}"


def engine_of(options, folder):
    if isinstance(options, str):  # a drafter and its layers
        pair = settings(*options.split(":"), folder.parent)
        options = (*pair, f"depth.max={DEPTH}", "constraint=llguidance")
    return serving(
        *options, "flow=resumable", "tier=[ram,disk]", f"tier.disk.path={folder}",
        "tier.disk.reserve_gb=0", f"stage.progress_capture.checkpoint_tokens={EVERY}",
    )  # fmt: skip


def disk_of(engine):
    return engine.pipeline.parts["tier"][1]


def cut_off(engine, wanted, folder, copy, cut=CUT):
    """The whole answer; the folder is copied when `cut` tokens are out. Each write is waited for, so that
    the copy does not depend on how fast the disk is. (whole answer, tokens that were out)"""
    emitted, out = [], []

    def seen(event):
        if isinstance(event, Delta):
            emitted.extend(event.token_ids)
            disk_of(engine).queue.settle(wait_s=20.0)
            if len(emitted) >= cut and not out:
                shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.tmp"))
                out.append(len(emitted))

    return Running(engine, PROMPT, seen=seen, **wanted).result(), out[0]


CASES = dict(cases())


@pytest.mark.parametrize("case", CASES)
def test_after_a_crash_it_goes_on_with_the_same_answer(case, tmp_path):
    options, how, more = CASES[case]
    wanted, copy = {**ASKED, **WANTED[how], **more}, tmp_path / "copy"
    with engine_of(options, tmp_path / "first") as engine:
        whole, out = cut_off(engine, wanted, tmp_path / "first", copy)
        assert whole["resumed_tokens"] == 0 and out < len(whole["token_ids"])
    with engine_of(options, copy) as engine:
        model, fed = engine.pipeline.parts["model"], []
        hidden = model.hidden
        model.hidden = lambda tokens, caches: fed.append(tokens.shape[1]) or hidden(tokens, caches)
        again, third = engine.generate(PROMPT, **wanted), engine.generate(PROMPT, **wanted)
        assert engine.stats()["counts"].get("faults", 0) == 0
        disk_of(engine).check_integrity()
    for field in ("token_ids", "text", "seed", "logprobs", "finish_reason", "completion_tokens"):
        assert again.get(field) == whole.get(field), field
    assert again["resumed_tokens"] >= out - EVERY
    assert again["cached_tokens"] == len(PROMPT)
    if again["speculation"]["drafted"] == 0:
        left = LENGTH - again["resumed_tokens"]
        assert sum(fed[:left]) == left <= LENGTH - out + EVERY
    assert third["resumed_tokens"] == 0, "a complete answer is not resumed"
