"""Rows of chunked attention, and of windows that keep their first tokens, against plain masks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import prompt_ids
from targets import Cpu

from stages.kv.native import Native
from stages.models.tiny import Tiny
from stages.rows.state import check, state_usable

WINDOW, KEEP, WIDTH = 12, 3, 4
LENGTHS = (1, 9, 40)
FAMILIES = {"chunked": "llama4", "sinks": "llama"}


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def target(kind, tmp_path_factory):
    """No model of mlx-lm 0.32 keeps first tokens by itself; `max_kv_size` makes any do so."""
    from mlx_lm.models.cache import RotatingKVCache
    from mlx_lm.models.llama import Model

    part = Tiny(Cpu(), family=FAMILIES[kind], cache_dir=str(tmp_path_factory.mktemp("cache")))
    with pytest.MonkeyPatch.context() as patch:
        if kind == "sinks":
            make = lambda self: [RotatingKVCache(WINDOW + KEEP, KEEP) for _ in self.layers]  # noqa: E731
            patch.setattr(Model, "make_cache", make)
        part.open()
    yield part
    part.close()


def test_what_is_read_from_the_caches(target, kind):
    assert {spec.kind for spec in target.specs} == {kind, "full"} - (
        {"full"} if kind == "sinks" else set()
    )
    assert target.specs[0].window == WINDOW
    assert target.specs[0].keep == (KEEP if kind == "sinks" else 0)


def expected(target, kind, ids):
    """Scores (W, V) with one token a forward on mlx-lm's own caches."""
    from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

    caches = make_prompt_cache(target._split.model)
    if kind == "sinks":
        caches = [RotatingKVCache(WINDOW + KEEP, KEEP) for _ in caches]
    steps = [target.head(target.hidden(mx.array([[token]]), caches))[0] for token in ids]
    return np.array(mx.concatenate(steps))


def new_rows(target, count):
    rows = Native().rows(target, WIDTH)
    rows.prepare_append([None] * count).commit()
    return rows


def run(target, rows, tokens, keep=None):
    round = rows.begin(tokens)
    scores = target.head(target.hidden(round.tokens_BW, round.caches))
    round.launch(scores)
    round.resolve(keep or [len(row) for row in tokens])
    rows.check_integrity()
    return np.array(scores)


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=2e-3, atol=5e-4)


def test_ragged_rows_with_rejected_bursts_equal_each_alone(target, kind):
    """Rows of other lengths, far past the window; three of four inputs are wrong and go back."""
    texts = [prompt_ids(n + 30, seed=n) for n in LENGTHS]
    truth = [expected(target, kind, text) for text in texts]
    rows = new_rows(target, len(texts))
    run(target, rows, [text[:n] for text, n in zip(texts, LENGTHS, strict=True)])
    for step in range(29):
        asked = [[text[n + step], 7, 8, 9] for text, n in zip(texts, LENGTHS, strict=True)]
        scores = run(target, rows, asked, [1] * len(texts))
        for row, n in enumerate(LENGTHS):
            close(scores[row, 0], truth[row][n + step])
    assert rows.lengths == [n + 29 for n in LENGTHS]


def test_long_rows_forget_and_go_on(target, kind):
    """Past what a buffer drops at once: chunks, then states taken, joined and cut."""
    text = prompt_ids(410)
    truth = expected(target, kind, text)
    rows = new_rows(target, 1)
    for start in range(0, 400, 100):
        scores = run(target, rows, [text[start : start + 100]])
    close(scores[0], truth[300:400])
    assert rows.layouts[0].starts[0] > 200
    state = rows.capture(0, text[:400], "n")
    check(state)
    assert state_usable(state, 399) == (0 if kind == "sinks" else state_usable(state, 399))
    other = new_rows(target, 1)
    run(target, other, [text[:5]])
    other.prepare_append([state, rows.extract(0, text[:400], "n"), None]).commit()
    other.filter([1, 0, 3])
    scores = run(target, other, [text[400:404], text[5:6], text[:2]])
    close(scores[0], truth[400:404])
    close(scores[1, 0], truth[5])
    close(scores[2, :2], truth[:2])
