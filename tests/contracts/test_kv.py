"""Every KV policy on disk keeps tokens exactly: what is rolled back, moved, saved or joined is what
would have been there without it. On every kind of layer: full (llama), sliding (gemma3, window 12),
keys shared between layers (gemma4), learned sinks (gpt_oss), recurrent (qwen3_next), latent
(deepseek_v3), composite (falcon_h1)."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from support import prompt_ids
from targets import Cpu, opened

from pipeline.types import Rows, State
from stages.kv.per_layer import PerLayer, numbered
from stages.kv.shapes import native_bytes
from stages.models.tiny import Tiny
from stages.rows.state import check, cut, is_exact, join, materialize, state_usable

GROUP = "kv"
WIDTH = 6
FAMILIES = ["llama", "gemma3", "gemma4", "gpt_oss", "qwen3_next", "deepseek_v3", "falcon_h1"]
LONG, SHORT = prompt_ids(31), prompt_ids(9, seed=4)


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    return opened(Tiny(Cpu(), family=request.param, head_size=64, cache_dir=folder))


@pytest.fixture
def policy(option, target, tmp_path):
    """A policy that goes by a map gets one that fits: 8 and 4 bits in turn, one layer left out."""
    if option.func is not PerLayer:
        return opened(option())
    places = zip(numbered(target.specs), target.specs, strict=True)
    layers = [place for place, spec in places if spec.codable][1:] or []
    entries = [{"layer_idx": i, "bits": 8 - 4 * (i % 2)} for i in layers]
    place = tmp_path / "kv_config.json"
    place.write_text(json.dumps(entries))
    return opened(option(map=str(place)))


def forward(rows: Rows, target, tokens, keep=None) -> mx.array:
    """Scores (B, W, V) of one round that keeps `keep` inputs a row, all where None."""
    round = rows.begin(tokens)
    scores = target.head(target.hidden(round.tokens_BW, round.caches))
    round.launch(scores)
    round.resolve([len(row) for row in tokens] if keep is None else keep)
    rows.check_integrity()
    return scores


def holding(policy, target, tokens, max_width=WIDTH) -> Rows:
    """Rows of one that took `tokens` in at once."""
    rows = policy.rows(target, max_width)
    rows.prepare_append([None]).commit()
    forward(rows, target, [tokens])
    return rows


def arrays(state: State) -> dict[tuple[int, str, int], np.ndarray]:
    """Each layer's arrays by name and by what they lack at the front, payloads at the end included."""
    (segment,) = state.segments
    sliced = {
        (layer, name, piece.first): np.array(array)
        for layer, piece in enumerate(segment.layers)
        if piece is not None
        for name, array in piece.arrays.items()
    }
    (payload,) = state.boundaries.values() or ({},)
    exact = {
        (layer, name, len(state.tokens)): np.array(array)
        for layer, arrays in payload.items()
        for name, array in arrays.items()
    }
    return sliced | exact


def hybrid(target) -> bool:
    """Whether some layers cannot be cut by tokens."""
    return any(map(is_exact, target.specs))


def assert_same(one: State, two: State) -> None:
    mine, other = arrays(one), arrays(two)
    assert mine.keys() == other.keys()
    for where, array in mine.items():
        np.testing.assert_array_equal(array, other[where], err_msg=str(where))


def test_what_is_rolled_back_was_never_there(policy, target):
    rewound, straight = holding(policy, target, LONG), holding(policy, target, LONG)
    burst = [7, 90, 41, 230, 8, 60]
    forward(rewound, target, [burst], keep=[2])
    # a recurrent layer goes back by going forward again, as wide as it went at first
    forward(straight, target, [[*burst[:2], 9, 9, 9, 9] if hybrid(target) else burst[:2]], keep=[2])
    assert_same(*(rows.extract(0, [*LONG, *burst[:2]], "n") for rows in (rewound, straight)))
    after = [forward(rows, target, [[5, 6, 7]]) for rows in (rewound, straight)]
    assert mx.array_equal(*after)
    forward(rewound, target, [burst], keep=[0])
    assert rewound.lengths == straight.lengths


def test_an_abandoned_round_leaves_nothing(policy, target):
    rows = holding(policy, target, LONG)
    before = arrays(rows.capture(0, LONG, "n"))
    round = rows.begin([[5, 6]])
    target.hidden(round.tokens_BW, round.caches)
    round.abandon()
    for where, array in arrays(rows.capture(0, LONG, "n")).items():
        np.testing.assert_array_equal(array, before[where])


def test_moved_rows_are_the_same_rows(policy, target):
    rows, other = holding(policy, target, LONG), holding(policy, target, SHORT)
    rows.prepare_append([other.extract(0, SHORT, "n"), None]).commit()
    rows.filter([1, 0])
    assert rows.lengths == [len(SHORT), len(LONG)]
    assert_same(rows.capture(0, SHORT, "n"), other.capture(0, SHORT, "n"))
    back = policy.rows(target, WIDTH)
    back.prepare_append([rows.capture(1, LONG, "n")]).commit()
    last = [forward(r, target, [[5, 6, 7]]) for r in (back, holding(policy, target, LONG))]
    assert mx.array_equal(*last)
    rows.filter([])
    assert rows.size == 0
    rows.check_integrity()


def test_unequal_rows_in_one_pass_equal_each_alone(policy, target):
    rows = holding(policy, target, LONG)
    rows.prepare_append([holding(policy, target, SHORT).extract(0, SHORT, "n")]).commit()
    alone = [holding(policy, target, tokens) for tokens in (LONG, SHORT)]
    rounds = [([[5, 6, 7], [9]], [1, 1]), ([[4], [8, 3, 2, 1]], [1, 3]), ([[7, 7], [6, 6]], [2, 0])]
    for tokens, keep in rounds:
        together = forward(rows, target, tokens, keep)
        for row, (ids, kept) in enumerate(zip(tokens, keep, strict=True)):
            single = forward(alone[row], target, [ids], [kept])
            assert mx.allclose(together[row, : len(ids)], single[0], atol=1e-4), (tokens, row)


def test_saved_state_can_be_cut_and_joined(policy, target):
    rows = holding(policy, target, LONG)
    state = rows.capture(0, LONG, "n")
    check(state)
    rest = [5, 6, 7, 8]
    forward(rows, target, [rest])
    whole = join(state, rows.capture(0, [*LONG, *rest], "n", start=len(LONG)))
    again = policy.rows(target, WIDTH)
    again.prepare_append([whole]).commit()
    after = [forward(r, target, [[9, 9]]) for r in (again, rows)]
    assert mx.array_equal(*after)
    if hybrid(target):
        assert state_usable(whole, len(LONG) + 2) == len(LONG)
        return
    shorter = cut(whole, len(LONG) + 2)
    assert materialize(shorter.segments[-1]).stop == len(LONG) + 2
    fewer = policy.rows(target, WIDTH)
    fewer.prepare_append([shorter]).commit()
    fresh = holding(policy, target, LONG)
    forward(fresh, target, [rest], keep=[2])
    assert mx.array_equal(*(forward(r, target, [[9, 9]]) for r in (fewer, fresh)))


def test_bytes_are_those_of_the_formula(policy, target):
    rows = holding(policy, target, LONG)
    slots = getattr(policy, "block_tokens", 256)  # one block, or what a buffer begins with
    whole = {
        i for i, one in enumerate(rows.layouts) if slots < 256 and one.arrays()
    }  # not in blocks
    apart = [a for i in whole | rows.exact.keys() for a in rows.layouts[i].arrays()]
    measured = (rows.nbytes() - sum(a.nbytes for a in apart)) / slots
    promised = policy.bytes_per_token(target) - sum(native_bytes(target.specs[i]) for i in whole)
    assert measured == pytest.approx(promised, rel=0.02)


def test_every_layer_is_covered_or_kept_with_a_reason(policy, target):
    coverage = policy.coverage(target)
    assert (
        coverage["layers"]
        == len(target.specs)
        == coverage["covered"] + sum(coverage["kept"].values())
    )
    assert coverage["bytes_per_token"] == policy.bytes_per_token(target)
    assert all(reason.partition(":")[2] for reason in coverage["kept"])


def test_a_window_slides_over_codes_as_over_numbers(policy, target):
    if target.family not in ("gemma3", "gpt_oss"):
        return  # no window
    tokens = prompt_ids(344, seed=2)
    slid, whole = holding(policy, target, tokens[:8], 8), holding(policy, target, tokens[:8], 8)
    for start in range(8, 344, 16):
        forward(slid, target, [tokens[start : start + 16]])
        forward(whole, target, [tokens[start : start + 16]])
        if start == 200:  # the other one joins anew, and so slides at other times
            state = whole.capture(0, tokens[:216], "n")
            whole = policy.rows(target, 8)
            whole.prepare_append([state]).commit()
    assert any(layout.starts[0] for layout in slid.layouts)
    assert mx.allclose(*(forward(r, target, [[5, 6]]) for r in (slid, whole)), atol=1e-4)


def test_identity_tells_policies_apart(policy):
    assert set(policy.identity) >= {"kv"}
    assert {"rewind", "batch", "snapshot", "speculate"} == set(policy.can) - {"donor"}
    policy.close()
    policy.close()
