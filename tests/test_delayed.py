"""`start`: what is before it is attended as the model computed it, whatever the way there; states say
from which length on they are of use."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest
from support import prompt_ids, serving
from targets import Cpu, opened

from pipeline.errors import OpenError
from stages.kv.affine import Affine
from stages.kv.native import Native
from stages.kv.rotated import Rotated
from stages.models.tiny import Tiny
from stages.rows.state import check, cut, join, state_usable

START, WIDTH = 24, 6
TOKENS = prompt_ids(60, seed=3)


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma4", "qwen3_next"])
def target(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    return opened(Tiny(Cpu(), family=request.param, head_size=64, cache_dir=folder))


def policy(start=START, made=Affine):
    return opened(made(**{"bits": 4} if made is Affine else {}, start=start))


def fed(rows, target, row_tokens, keep=None):
    """Scores (B, W, V) of a round."""
    round = rows.begin(row_tokens)
    scores = target.head(target.hidden(round.tokens_BW, round.caches))
    round.launch(scores)
    round.resolve(keep or [len(ids) for ids in row_tokens])
    rows.check_integrity()
    return scores


def fresh(kv, target, *states):
    rows = kv.rows(target, WIDTH)
    rows.prepare_append(states or [None]).commit()
    return rows


def by_spans(kv, target, *stops):
    """Scores of each of TOKENS, taken in by spans that end there."""
    rows = fresh(kv, target)
    spans = [fed(rows, target, [TOKENS[a:b]])[0] for a, b in pairwise((0, *stops))]
    return mx.concatenate(spans), rows


@pytest.mark.parametrize("made", [Affine, Rotated])
def test_a_position_reads_what_its_side_of_start_reads(target, made):
    whole, _ = by_spans(policy(made=made), target, len(TOKENS))
    native, _ = by_spans(opened(Native()), target, len(TOKENS))
    assert mx.array_equal(whole[:START], native[:START])
    assert mx.abs(whole[START:] - native[START:]).max() > 1e-3
    for stops in ((5, 20, 23, 24, 25, 60), (30, 60), (START, 60), (20, *range(21, 61))):
        scores, rows = by_spans(policy(made=made), target, *stops)
        assert mx.array_equal(scores, whole), stops
        late = [one.early.buffers for one in rows.layouts if hasattr(one, "early")]
        assert late and not any(late)


def test_from_start_on_a_row_of_codes_is_all_there_is(target):
    """A model that computes nothing before `start` from codes differs from one that always does."""
    always, _ = by_spans(policy(start=0), target, len(TOKENS))
    never, _ = by_spans(policy(start=61), target, len(TOKENS))
    native, _ = by_spans(opened(Native()), target, len(TOKENS))
    assert mx.array_equal(never, native) and not mx.array_equal(always, native)


def test_what_is_rolled_back_over_start_was_never_there(target):
    rows, straight = (by_spans(policy(), target, 22)[1] for _ in range(2))
    for keep in (1, 0, 1):
        fed(rows, target, [[9, 9, 8, 8]], keep=[keep])
    fed(straight, target, [[9, 8, 8, 8]], keep=[1])
    fed(straight, target, [[9, 8, 8, 8]], keep=[1])
    for _ in range(5):
        after = [fed(one, target, [[5, 6, 7]], keep=[2]) for one in (rows, straight)]
        assert mx.array_equal(*after)


def test_rows_on_both_sides_are_each_as_alone(target):
    parts = (40, 10, 22)
    rows = fresh(policy(), target)
    rows.filter([])
    for length in parts:
        state = by_spans(policy(), target, length)[1].extract(0, TOKENS[:length], "n")
        rows.prepare_append([state]).commit()
    alone = [by_spans(policy(), target, length)[1] for length in parts]
    for widths, keep in (((3, 1, 4), (3, 1, 2)), ((1, 5, 2), (1, 5, 2)), ((2, 6, 1), (0, 6, 1))):
        asked = [TOKENS[:width] for width in widths]
        together = fed(rows, target, asked, list(keep))
        for row, (ids, kept) in enumerate(zip(asked, keep, strict=True)):
            single = fed(alone[row], target, [ids], [kept])
            assert mx.allclose(together[row, : len(ids)], single[0], atol=1e-4), row
    rows.filter([2, 0])
    assert mx.isfinite(fed(rows, target, [[5], [6]])).all()


def test_states_say_where_they_are_of_use(target):
    _, rows = by_spans(policy(), target, 20)
    early = rows.capture(0, TOKENS[:20], "n")
    assert early.min_reuse == 0 and not rows.cuttable_later(20)
    fed(rows, target, [TOKENS[20:50]])
    late = rows.capture(0, TOKENS[:50], "n")
    assert late.min_reuse == START
    for state in (early, late):
        check(state)
        again = fresh(policy(), target, state)
        length = len(state.tokens)
        scores = fed(again, target, [TOKENS[length:60]])[0]
        assert mx.array_equal(scores, by_spans(policy(), target, length, 60)[0][length:])
    if target.family != "llama":
        return  # neither windows nor recurrent layers can be cut far behind
    assert state_usable(early, 10) == 10
    assert state_usable(late, START - 1) == 0 and state_usable(late, START + 1) == START + 1
    shorter = fresh(policy(), target, cut(late, 30))
    assert mx.array_equal(
        fed(shorter, target, [TOKENS[30:60]])[0], by_spans(policy(), target, 30, 60)[0][30:]
    )
    tail = rows.capture(0, TOKENS[:50], "n", start=30)
    assert join(cut(late, 30), tail).min_reuse == START


@pytest.mark.parametrize("tiers", ["tier=ram", "tier=[ram,disk]"])
def test_prefixes_are_reused_on_both_sides(tiers, tmp_path):
    """Short and long answers warm, after a restart too where there is a disk, equal cold ones."""
    chosen = ("model.head_size=64", "kv=kv4", "kv.start=30", f"tier.disk.path={tmp_path}")
    chosen = chosen[: 3 + ("disk" in tiers)]
    prompts = [TOKENS[:n] + prompt_ids(3, seed=n) for n in (17, 24, 40, 57)]

    def answers(*overrides):
        with serving("model.family=llama", *chosen[:3], *overrides) as engine:
            found = [engine.generate(p, max_tokens=12, ignore_eos=True) for p in prompts * 2]
        return [one["token_ids"] for one in found], [one["cached_tokens"] for one in found]

    cold, _ = answers("tier=none")
    for _ in range(1 + ("disk" in tiers)):
        warm, cached = answers(tiers, *chosen[3:])
        assert warm == cold
    assert min(cached[4:]) >= 16, cached


def test_a_start_that_is_no_position_is_refused():
    with pytest.raises(ValueError, match="start: wants >= 0, got -1"):
        Affine(start=-1)


def test_a_start_that_no_text_gets_to_is_refused_with_the_numbers(target):
    context = target.context_len
    policy(context - 1).rows(target, WIDTH).close()
    with pytest.raises(
        OpenError, match=f"context of {context:,} tokens.* from position {context:,} on"
    ):
        policy(context).rows(target, WIDTH)


def test_start_is_part_of_what_a_state_is_and_is_billed(target):
    assert policy(0).identity != policy(8).identity
    assert policy(0).early_bytes_per_token(target) == 0
    assert policy(8).early_bytes_per_token(target) > policy(8).bytes_per_token(target) / 2
    rows = by_spans(policy(), target, 10)[1]
    exact = sum(a.nbytes for i in rows.exact for a in rows.layouts[i].arrays())
    wanted = policy().bytes_per_token(target) + policy().early_bytes_per_token(target)
    assert (rows.nbytes() - exact) / 256 == pytest.approx(wanted, rel=0.02)
