"""Layers that cannot rewind (B20): after every round all arrays equal a fresh run of what was kept."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from support import prompt_ids
from targets import Cpu

from pipeline.errors import OpenError
from stages.kv.native import Native
from stages.models.loading import mixers
from stages.models.tiny import Tiny
from stages.rows.state import check, cut, state_usable

DEPTH = 4
HYBRIDS = ["qwen3_next", "falcon_h1", "mamba2", "nemotron_h"]  # nemotron_h lets padding in


@pytest.fixture(scope="module", params=HYBRIDS)
def target(request, tmp_path_factory):
    part = Tiny(Cpu(), family=request.param, cache_dir=str(tmp_path_factory.mktemp("cache")))
    part.open()
    yield part
    part.close()


def new_rows(target, count=1):
    rows = Native().rows(target, DEPTH + 1)
    rows.prepare_append([None] * count).commit()
    return rows


def run(target, rows, tokens, keep):
    """One round; the scores (rows, width, vocabulary)."""
    round = rows.begin(tokens)
    scores = target.head(target.hidden(round.tokens_BW, round.caches))
    round.launch(scores)
    round.resolve(keep)
    return np.asarray(scores)


def fresh(target, tokens):
    rows = new_rows(target)
    run(target, rows, [tokens], [len(tokens)])
    return rows.capture(0, tokens, "n")


def assert_same(state, other):
    check(state)
    assert state.tokens == other.tokens and state.specs == other.specs
    for mine, theirs in zip(state.segments[0].layers, other.segments[0].layers, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            _close(mine.arrays, theirs.arrays)
    length = len(state.tokens)
    assert state.boundaries[length].keys() == other.boundaries[length].keys()
    for layer, payload in state.boundaries[length].items():
        _close(payload, other.boundaries[length][layer])


def _close(mine, theirs):
    """Rounding by width reaches 1e-4 in these sharp random layers; one token too many gives 0.1."""
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        np.testing.assert_allclose(np.array(array), np.array(theirs[name]), rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("wrong_at", range(DEPTH + 1))
def test_a_drafter_wrong_at_position_r(target, wrong_at):
    """r accepted drafts, hence r + 1 inputs kept; r = DEPTH keeps everything. One row goes a round
    behind the other, keeps another number, and sometimes nothing."""
    rows = new_rows(target, 2)
    held = [prompt_ids(9), prompt_ids(9, seed=1)]
    run(target, rows, held, [9, 9])
    for turn in range(12):
        asked = [prompt_ids(1 + DEPTH, seed=turn), prompt_ids(1 + turn % 3, seed=99 - turn)]
        keep = [wrong_at + 1, turn % 3 if turn % 4 else min(1, len(asked[1]))]
        run(target, rows, asked, keep)
        for ids, new, count in zip(held, asked, keep, strict=True):
            ids.extend(new[:count])
        rows.check_integrity()
        assert rows.lengths == [len(held[0]), len(held[1])]
        if turn % 3 == 2:
            for row, ids in enumerate(held):
                assert_same(rows.capture(row, ids, "n"), fresh(target, ids))


def test_replay_repeats_the_very_numbers(target):
    """The state after k kept inputs of a wide round is the same bit for bit, whatever followed."""
    states = []
    for tail in (1, 2):
        rows = new_rows(target)
        run(target, rows, [prompt_ids(8)], [8])
        run(target, rows, [[5, 6, *prompt_ids(3, seed=tail)]], [2])
        states.append(rows.capture(0, [*prompt_ids(8), 5, 6], "n"))
    for one, other in zip(*(s.boundaries[10].values() for s in states), strict=True):
        assert all(np.array_equal(np.array(one[n]), np.array(other[n])) for n in one)


def test_padding_does_not_move_a_row(target):
    """B30: three rows of 1, 3 and 5 inputs score as each alone."""
    tokens = [prompt_ids(n, seed=n) for n in (1, 3, 5)]
    rows = new_rows(target, 3)
    together = run(target, rows, tokens, [1, 3, 5])
    for row, ids in enumerate(tokens):
        alone = run(target, new_rows(target), [ids], [len(ids)])
        np.testing.assert_allclose(together[row, : len(ids)], alone[0], atol=1e-4)
        assert_same(rows.capture(row, ids, "n"), fresh(target, ids))


def test_a_round_ahead_needs_no_replay(target):
    rows = new_rows(target)
    ids = prompt_ids(6)
    run(target, rows, [ids], [6])
    first = rows.begin([[7]])
    first.launch(target.hidden(first.tokens_BW, first.caches))
    ahead = rows.begin_ahead()
    scores = target.hidden(ahead.tokens_BW, ahead.caches)
    first.resolve([1])
    ahead.feed([8])
    ahead.launch(scores)
    ahead.resolve([1])
    assert_same(rows.capture(0, [*ids, 7, 8], "n"), fresh(target, [*ids, 7, 8]))


def test_an_abandoned_round_leaves_nothing(target):
    rows = new_rows(target)
    ids = prompt_ids(6)
    run(target, rows, [ids], [6])
    first = rows.begin([[7]])
    first.launch(target.hidden(first.tokens_BW, first.caches))
    ahead = rows.begin_ahead()
    target.hidden(ahead.tokens_BW, ahead.caches)
    ahead.abandon()
    first.resolve([0])
    assert_same(rows.capture(0, ids, "n"), fresh(target, ids))


def test_membership_and_saved_state(target):
    """Rows come from saved state, leave, and join others; a state is usable at its length alone."""
    ids, other = prompt_ids(12), prompt_ids(7, seed=3)
    saved = fresh(target, ids)
    assert state_usable(saved, 12) == 12 and state_usable(saved, 11) == 0
    rows = new_rows(target)
    run(target, rows, [other], [7])
    rows.prepare_append([saved, None]).commit()
    rows.filter([1, 2, 0])
    run(target, rows, [[4, 5], [6], [7, 8, 9]], [1, 1, 2])
    for row, held in enumerate(([*ids, 4], [6], [*other, 7, 8])):
        assert_same(rows.capture(row, held, "n"), fresh(target, held))
        assert_same(rows.extract(row, held, "n"), fresh(target, held))
    with pytest.raises(AssertionError):
        cut(saved, 5)


def test_a_round_too_wide_to_go_back_keeps_no_inputs(target):
    rows = new_rows(target)
    round = rows.begin([prompt_ids(DEPTH + 2)])
    round.launch(target.hidden(round.tokens_BW, round.caches))
    with pytest.raises(AssertionError, match="cannot be rolled back"):
        round.resolve([3])


def test_a_model_that_lets_padding_in_runs_its_rows_one_by_one(monkeypatch, tmp_path):
    """mlx-lm's `ArraysCache.lengths` is a request that some of its families ignore."""
    from mlx_lm.models import qwen3_next

    own = qwen3_next.Qwen3NextGatedDeltaNet.__call__

    def deaf(self, inputs, mask=None, cache=None):
        class Hidden:
            lengths = None
            advance = staticmethod(lambda width: None)
            __getitem__ = staticmethod(lambda slot: cache[slot])
            __setitem__ = staticmethod(lambda slot, value: cache.__setitem__(slot, value))

        return own(self, inputs, None, None if cache is None else Hidden())

    monkeypatch.setattr(qwen3_next.Qwen3NextGatedDeltaNet, "__call__", deaf)
    part = Tiny(Cpu(), family="qwen3_next", cache_dir=str(tmp_path))
    part.open()
    for wrong_at in (0, 2, DEPTH):
        test_a_drafter_wrong_at_position_r(part, wrong_at)
    test_padding_does_not_move_a_row(part)
    test_a_round_ahead_needs_no_replay(part)


def test_a_state_that_is_made_elsewhere_is_refused_at_open(monkeypatch, tmp_path):
    from mlx_lm.models import qwen3_next

    own = qwen3_next.Qwen3NextDecoderLayer.__call__

    def meddling(self, x, mask=None, cache=None):
        out = own(self, x, mask, cache)
        if self.is_linear and cache is not None:
            cache[1] = cache[1] + x.sum()
        return out

    monkeypatch.setattr(qwen3_next.Qwen3NextDecoderLayer, "__call__", meddling)
    part = Tiny(Cpu(), family="qwen3_next", cache_dir=str(tmp_path))
    with pytest.raises(OpenError, match=r"layers \[0, 2\] cannot be rolled back"):
        part.open()


def test_mixers_keep_their_names_and_weights(target):
    from mlx.utils import tree_flatten

    model = target._split.model
    telling = [m for _, m in model.named_modules() if isinstance(m, mixers._Telling)]
    assert telling and not any(type(module).__name__.startswith("_") for module in telling)
    assert all(isinstance(a, mx.array) for _, a in tree_flatten(model.parameters()))


def test_a_model_of_one_position_for_all_rows_is_refused_at_open(monkeypatch, tmp_path):
    from mlx_lm.models import llama

    own = llama.Attention.__call__

    def scalar(self, x, mask=None, cache=None):
        if cache is not None:
            mx.arange(cache.offset, cache.offset + 1)
        return own(self, x, mask, cache)

    monkeypatch.setattr(llama.Attention, "__call__", scalar)
    with pytest.raises(OpenError, match="does not run on rows of unequal length"):
        Tiny(Cpu(), family="llama", cache_dir=str(tmp_path)).open()


def test_an_unknown_cache_class_is_named(tmp_path):
    """`LayerCache` (deepseek_v41) has no layout."""
    from pipeline.types import LayerSpec

    part = Tiny(Cpu(), family="llama", cache_dir=str(tmp_path))
    part.open()
    part.specs = (part.specs[0], LayerSpec("LayerCache", 0, "LayerCache:2x16:float32"))
    with pytest.raises(OpenError, match=r"LayerCache in layers \[1\].*add a layout"):
        Native().rows(part, 2)
