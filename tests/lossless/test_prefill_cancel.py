"""Rows that are cancelled while several prefill together: not computed any further, no trace left."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest
from support import Running, prompt_ids, serving

LENGTH, CHUNK, ROWS = 49, 8, 3  # the last token stays pending: 6 chunks of 8
PROMPTS = [prompt_ids(LENGTH, seed=seed) for seed in range(ROWS)]
WANTED: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with serving(
        "model.layers=2", "model.delay_ms=1", f"stage.chunked_prefill.chunk={CHUNK * ROWS}",
        "drafter=none", "flow=plain", "tier=none", recipe="fake",
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def alone(engine):
    return [engine.generate(prompt, **WANTED)["token_ids"] for prompt in PROMPTS]


@contextmanager
def held(engine):
    """Requests made inside start together: the engine's thread waits meanwhile."""
    gate, holding = threading.Event(), threading.Event()
    engine.when_idle(lambda: (holding.set(), gate.wait(10)))
    assert holding.wait(10)
    full = engine._inbox.qsize() + ROWS
    yield
    until = time.monotonic() + 10
    while engine._inbox.qsize() < full:  # all are prepared
        assert time.monotonic() < until
        time.sleep(0.001)
    gate.set()


class Chunks:
    """The rows of each prefill chunk and its width; after chunk `at` the doomed are cancelled."""

    def __init__(self, engine, monkeypatch, doomed, at):
        self.rows: list[list[int]] = []
        self.widths: list[int] = []
        self.tickets: list[Any] = []
        stage, model = engine.pipeline.stages["chunked_prefill"], engine.pipeline.parts["model"]
        run, hidden = stage.run, model.hidden

        def counted(tokens_BW, caches):
            if self.running:
                assert tokens_BW.shape[0] == len(self.rows[-1])
                self.widths.append(tokens_BW.shape[1])
            return hidden(tokens_BW, caches)

        def watched(batch):
            self.rows.append([PROMPTS.index(s.prompt_ids) for s in batch.sequences])
            self.running = True
            run(batch)
            self.running = False
            if len(self.rows) == at:
                for row in doomed:
                    self.tickets[row].cancel()
                    self.tickets[row].cancel()  # twice is once

        self.running = False
        monkeypatch.setattr(stage, "run", watched)
        monkeypatch.setattr(model, "hidden", counted)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("doomed", [(0,), (1,), (2,), (0, 2)])
def test_a_row_that_leaves_is_in_no_further_chunk(engine, alone, monkeypatch, doomed, at):
    chunks = Chunks(engine, monkeypatch, doomed, at)
    with held(engine):
        runs = [Running(engine, prompt, **WANTED) for prompt in PROMPTS]
        chunks.tickets = [run.ticket for run in runs]
    results = [run.result() for run in runs]
    assert [sorted(rows) for rows in chunks.rows[:at]] == [[0, 1, 2]] * at
    stay = [row for row in range(ROWS) if row not in doomed]
    assert all(sorted(rows) == stay for rows in chunks.rows[at:])
    assert sum(chunks.widths) == LENGTH - 1  # no token of a survivor is read twice
    for row, result in enumerate(results):
        assert result["finish_reason"] == ("cancelled" if row in doomed else "length")
        assert result["token_ids"] == ([] if row in doomed else alone[row])
    stats = engine.stats()
    assert stats["rows"]["open_requests"] == stats["rows"]["active"] == stats["kv_bytes"] == 0


@pytest.mark.parametrize("at", [0, 2], ids=["before the first chunk", "after two"])
def test_all_rows_leave(engine, alone, monkeypatch, at):
    chunks = Chunks(engine, monkeypatch, range(ROWS), at)
    with held(engine):
        runs = [Running(engine, prompt, **WANTED) for prompt in PROMPTS]
        chunks.tickets = [run.ticket for run in runs]
        for run in runs if at == 0 else ():
            run.ticket.cancel()
    assert [run.result()["finish_reason"] for run in runs] == ["cancelled"] * ROWS
    assert len(chunks.rows) == at
    assert engine.stats()["rows"]["prefilling"] == 0
    assert engine.generate(PROMPTS[0], **WANTED)["token_ids"] == alone[0]
