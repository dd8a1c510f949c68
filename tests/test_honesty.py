"""Stages touch the fields of `Sequence` that they declare, and no other."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import fields

import pytest
from support import ORACLE, Running, prompt_ids, serving, together

import pipeline.engine
from pipeline.types import Sequence

FREE = {  # the engine's: `live`, one row's failure, counters, the way out
    "cancelled", "error", "finish_reason", "counts", "timings", "ready", "deliver", "request", "live",
    "position", "entered", "submitted", "drafted_by_position",
    "accepted_by_position",
}  # fmt: skip
NAMES = [f.name for f in fields(Sequence)]
CONFIGS = {
    "tail": ("flow=speculative", "drafter=suffix", "drafter.remember=256", "tier=ram"),
    "full": ("flow=speculative", ORACLE, "+drafter.prefill=full", "tier=ram"),
    "plain": ("flow=plain", "drafter=none", "tier=ram"),
    "resumable": (
        "flow=resumable",
        "drafter=ngram",
        "tier=[ram,disk]",
        "tier.disk.reserve_gb=0",
        "tier.disk.path={}",
        "stage.progress_capture.checkpoint_tokens=4",
    ),
}


HERE = threading.local()  # .reading: the set that notes what this thread's stage reads


class Watched(Sequence):
    """Notes every field that is read while a stage runs."""

    def __getattribute__(self, name):
        noted = getattr(HERE, "reading", None)
        if noted is not None and name in NAMES:
            noted.add(name)
        return object.__getattribute__(self, name)


def values(sequence):
    """What each field holds, lists by content."""
    held = object.__getattribute__(sequence, "__dict__")
    return {n: list(v) if isinstance(v := held[n], list) else v for n in NAMES}


@pytest.mark.parametrize("config", CONFIGS)
def test_declarations_are_honest(config, monkeypatch, tmp_path):
    reads, writes = defaultdict(set), defaultdict(set)
    monkeypatch.setattr(pipeline.engine, "Sequence", Watched)
    with serving(*(word.format(tmp_path) for word in CONFIGS[config])) as engine:
        for name, stage in engine.pipeline.stages.items():
            monkeypatch.setattr(stage, "run", watch(name, stage, reads, writes))
        together(
            engine, [prompt_ids(n) for n in (20, 20, 33)], max_tokens=8, temperature=0.5, stop="~~"
        )
        together(engine, [prompt_ids(33)], max_tokens=8)
        cut = Running(engine, prompt_ids(33), max_tokens=400, ignore_eos=True)
        assert next(iter(cut))
        time.sleep(0.2)  # something of it is kept, where the flow keeps it
        cut.ticket.cancel()
        list(cut)
        together(engine, [prompt_ids(33)], max_tokens=400, ignore_eos=True)
        stages = dict(engine.pipeline.stages)
    for name, stage in stages.items():
        declared_reads = {*stage.reads, *stage.writes, *FREE}
        assert reads[name] <= declared_reads, (name, "reads", reads[name] - declared_reads)
        assert writes[name] <= {*stage.writes, *FREE}, (
            name,
            "writes",
            writes[name] - set(stage.writes),
        )
    assert writes["accept"] >= {"emitted"}
    assert writes["commit"] >= {"pending"}
    assert config != "resumable" or writes["resume"] >= {"output_ids", "match", "resumed_len"}


def watch(name, stage, reads, writes):
    run = type(stage).run

    def watched(batch):
        before = [values(s) for s in batch.sequences]
        HERE.reading = reads[name]
        try:
            run(stage, batch)
        finally:
            HERE.reading = None
        for sequence, old in zip(batch.sequences, before, strict=True):
            new = values(sequence)
            writes[name] |= {n for n in NAMES if new[n] is not old[n] and not same(new[n], old[n])}

    return watched


def same(new, old):
    return isinstance(new, list | int | str | float | tuple) and new == old
