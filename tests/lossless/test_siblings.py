"""n choices of one prompt: each is what it is alone, and the prompt is prefilled once."""

from __future__ import annotations

import pytest
from support import Running, prompt_ids, serving, together

LENGTH, CHUNK, N = 96, 16, 4
WANTED = {"max_tokens": 12, "temperature": 0.9, "prefill_chunk": CHUNK}
KINDS = {
    "plain": ("flow=plain", "drafter=none", "tier=none"),
    "drafted": ("flow=speculative", "drafter=ngram", "drafter.min_ngram=1", "tier=[ram]"),
    "recurrent": ("model.family=qwen3_5", "flow=plain", "drafter=none", "tier=none"),
    "paged": ("kv=paged", "flow=plain", "drafter=none", "tier=none"),
    "fair": ("scheduler=fair", "flow=plain", "drafter=none", "tier=none"),
}


def choices(engine, prompt, group="g", n=N):
    runs = [Running(engine, prompt, **WANTED, seed=i, group=group) for i in range(n)]
    return [run.result() for run in runs]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_each_is_what_it_is_alone_and_the_prompt_runs_once(kind):
    prompt = prompt_ids(LENGTH)
    with serving(*kind, "limits.max_rows=8") as engine:
        alone = [engine.generate(prompt_ids(LENGTH), **WANTED, seed=i) for i in range(N)]
    with serving(*kind, "limits.max_rows=8") as engine:
        got = choices(engine, prompt)
        counts = engine.stats()["counts"]
    assert [g["token_ids"] for g in got] == [a["token_ids"] for a in alone]
    assert len({tuple(g["token_ids"]) for g in got}) > 1
    assert (
        counts["prompt_tokens"] - counts["cached_tokens"] == LENGTH + N - 1
    )  # the last token of a prompt is each choice's own


def test_more_choices_than_rows_and_other_clients():
    with serving(*KINDS["plain"], "limits.max_rows=2") as engine:
        others = [prompt_ids(20, seed) for seed in range(3)]
        alone = [engine.generate(prompt_ids(LENGTH), **WANTED, seed=i) for i in range(N)]
        calm = [engine.generate(prompt, **WANTED, seed=9) for prompt in others]
        runs = [Running(engine, prompt_ids(LENGTH), **WANTED, seed=i, group="g") for i in range(N)]
        assert [r["token_ids"] for r in together(engine, others, **WANTED, seed=9)] == [
            c["token_ids"] for c in calm
        ]
        assert [run.result()["token_ids"] for run in runs] == [a["token_ids"] for a in alone]


def test_a_leader_that_leaves_is_succeeded():
    with serving(*KINDS["plain"]) as engine:
        alone = [engine.generate(prompt_ids(LENGTH), **WANTED, seed=i) for i in range(1, N)]
        runs = [Running(engine, prompt_ids(LENGTH), **WANTED, seed=i, group="g") for i in range(N)]
        runs[0].ticket.cancel()
        assert [run.result()["token_ids"] for run in runs[1:]] == [a["token_ids"] for a in alone]
