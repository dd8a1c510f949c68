"""Blocks: whatever is appended, rolled back, forked, saved, cut, joined or dropped, rows and states hold
what plain arrays would, and every reference is accounted for."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support import Running, prompt_ids, serving
from targets import Cpu, opened

from pipeline.errors import OpenError
from pipeline.types import LayerSlice, LayerSpec, State
from stages.kv.affine import Affine
from stages.kv.native import Native
from stages.kv.paged import Paged
from stages.models.tiny import Tiny
from stages.rows.attention import AttentionLayout
from stages.rows.blocks import Pool
from stages.rows.paged import paged_rows
from stages.rows.state import check, cut, plain, state_usable

HEADS, SIZE, WINDOW, BLOCK, WIDTH = 2, 3, 7, 4, 5
FULL = LayerSpec("full", signature=f"full:{HEADS}x{SIZE}:float32")
SLIDING = LayerSpec("sliding", WINDOW, f"sliding:{HEADS}x{SIZE}:float32")


def numbers(layer: int, tokens: list[int]) -> np.ndarray:
    """What a layer would compute of these tokens: (heads, tokens, size), each from itself and its place."""
    at = np.arange(len(tokens)) + 0.001 * np.array(tokens, np.float32)
    parts = [np.arange(HEADS) * 0.25, np.arange(SIZE) * 0.125]
    return (at[None, :, None] + parts[0][:, None, None] + parts[1] + 1000 * layer).astype(
        np.float32
    )


class Checked:
    """Paged rows beside the token lists that they stand for."""

    def __init__(self, specs, dtype=mx.float32, seed=0):
        self.specs, self.dtype, self.rng = tuple(specs), dtype, random.Random(seed)
        self.pools = {spec.window: Pool(BLOCK) for spec in specs}
        self.batches = [self.empty(), self.empty()]
        self.told: list[list[list[int]]] = [[], []]
        self.saved: list[State] = []

    def empty(self):
        return paged_rows(self.specs, WIDTH, self.pools, AttentionLayout)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(9) for _ in range(count)]

    # --- forwards

    def forward(self, rows, held: list[list[int]], inputs: list[list[int]]) -> None:
        """As a model would: hand in keys and values, look at what comes back."""
        width = max(map(len, inputs))
        for layer, layout in enumerate(rows.layouts):
            padded = [
                h + ids + [8] * (width - len(ids)) for h, ids in zip(held, inputs, strict=True)
            ]
            new = np.stack([numbers(layer, p)[:, len(p) - width :] for p in padded])
            keys = mx.array(new).astype(self.dtype)
            mask = layout.make_mask(width, return_array=True)
            fetched = layout.update_and_fetch(keys, keys + 1)
            for row, (before, ids) in enumerate(zip(held, inputs, strict=True)):
                for column in range(len(ids)):
                    self.see(layer, fetched, row, mask[row, 0, column], before + ids[: column + 1])

    def see(self, layer, fetched, row, mask_T, tokens) -> None:
        """A query of the last of `tokens` attends exactly what its layer lets it see."""
        first = max(0, len(tokens) - WINDOW) if self.specs[layer].window else 0
        wanted = mx.array(numbers(layer, tokens)[:, first:]).astype(self.dtype)
        seen = np.flatnonzero(np.array(mask_T))
        for array, what in zip(fetched, (wanted, wanted + 1), strict=True):
            assert mx.array_equal(array[row][:, mx.array(seen)], what), (layer, row, len(tokens))

    def step(self, which: int) -> None:
        rows, told = self.batches[which], self.told[which]
        if not told:
            return
        inputs = [self.tokens(self.rng.randrange(WIDTH + 1)) for _ in told]
        inputs[0] = inputs[0] or [1]
        keep = [self.rng.randrange(len(ids) + 1) for ids in inputs]
        round = rows.begin(inputs)
        self.forward(rows, told, inputs)
        if self.rng.random() < 0.2:
            round.abandon()
            return
        round.launch()
        if self.rng.random() < 0.3:
            keep = self.ahead(which, inputs, keep)
        round.resolve(keep)
        for ids, new, count in zip(told, inputs, keep, strict=True):
            ids += new[:count]
        self.finish_ahead(which)

    def ahead(self, which: int, inputs, keep):
        rows, told = self.batches[which], self.told[which]
        self.round = rows.begin_ahead()
        self.fed = [self.tokens(1) for _ in told]
        held = [ids + new for ids, new in zip(told, inputs, strict=True)]
        self.forward(rows, held, self.fed)
        if self.rng.random() < 0.5:
            self.round.abandon()
            self.round = None
            return keep
        return [len(ids) for ids in inputs]

    def finish_ahead(self, which: int) -> None:
        if (round := getattr(self, "round", None)) is not None:
            round.launch()
            round.resolve([1] * len(self.fed))
            for ids, new in zip(self.told[which], self.fed, strict=True):
                ids += new
        self.round = None

    # --- membership

    def save(self, which: int) -> None:
        rows, told = self.batches[which], self.told[which]
        filled = [row for row, ids in enumerate(told) if ids]
        if filled:
            row = self.rng.choice(filled)
            make = self.rng.choice([rows.capture, rows.extract])
            self.saved.append(make(row, told[row], "n"))

    def join(self, which: int) -> None:
        states: list[State | None] = [self.rng.choice([None, *self.saved]) for _ in range(2)]
        for index, state in enumerate(states):
            if state is not None and self.rng.random() < 0.4:
                usable = state_usable(state, self.rng.randrange(1, len(state.tokens) + 1))
                states[index] = cut(state, usable) if usable else None
            if state is not None and self.rng.random() < 0.2:
                states[index] = elsewhere(state)
        change = self.batches[which].prepare_append(states)
        if self.rng.random() < 0.8:
            change.commit()
            self.told[which] += [list(state.tokens) if state else [] for state in states]
        change.dispose()

    def leave(self, which: int) -> None:
        count = len(self.told[which])
        keep = self.rng.sample(range(count), min(count, self.rng.randrange(4)))
        self.batches[which].filter(keep)
        self.told[which] = [self.told[which][row] for row in keep]

    def close(self, which: int) -> None:
        self.batches[which].close()
        self.batches[which], self.told[which] = self.empty(), []

    def forget(self, which: int) -> None:
        if self.saved:
            self.saved.pop(self.rng.randrange(len(self.saved)))

    def check(self) -> None:
        for rows, told in zip(self.batches, self.told, strict=True):
            assert list(rows.lengths) == [len(ids) for ids in told]
            rows.check_integrity()
        for state in self.saved:
            check(state)
            for layer, piece in enumerate(state.segments[0].layers):
                wanted = mx.array(numbers(layer, list(state.tokens))[:, piece.first :])
                keys = plain(piece.arrays["keys"])
                assert keys.dtype == self.dtype and mx.array_equal(keys, wanted.astype(self.dtype))


def elsewhere(state: State) -> State:
    """The same state in ordinary arrays, as it comes from a disk."""
    segments = [
        replace(
            segment,
            layers=tuple(
                LayerSlice(piece.first, {name: plain(a) for name, a in piece.arrays.items()})
                for piece in segment.layers
            ),
        )
        for segment in state.segments
    ]
    return replace(state, segments=tuple(segments))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("specs", [(FULL, FULL), (SLIDING,), (FULL, SLIDING)])
def test_any_operations_leave_what_plain_arrays_would_hold(specs, dtype):
    rows = Checked(specs, dtype, seed=len(specs))
    work = [rows.step] * 8 + [rows.save, rows.join, rows.join, rows.leave, rows.forget]
    rows.join(0)
    for turn in range(250):
        (rows.rng.choice(work) if turn % 60 else rows.close)(rows.rng.randrange(2))
        rows.check()
    assert any(pool.copies for pool in rows.pools.values())
    for which in range(2):
        rows.close(which)
    rows.saved.clear()
    for pool in rows.pools.values():
        pool.trim()
        assert (pool.used, pool.nbytes()) == (0, 0)


def test_rows_from_one_state_share_its_blocks_and_copy_the_one_they_write_to():
    rows = Checked([FULL])
    rows.join(0)  # nothing is saved yet: two empty rows
    batch, told, pool = rows.batches[0], rows.told[0], rows.pools[0]
    prefix = rows.tokens(4 * BLOCK + 2)
    for start in range(0, len(prefix), WIDTH):
        inputs = [prefix[start : start + WIDTH], []]
        round = batch.begin(inputs)
        rows.forward(batch, told, inputs)
        round.launch()
        round.resolve([len(inputs[0]), 0])
        told[0] += inputs[0]
    assert pool.used == 5
    state = batch.capture(0, prefix, "n")
    batch.prepare_append([state] * 3).commit()
    told += [list(prefix) for _ in range(3)]
    assert (pool.used, pool.copies) == (5, 0), "sharing takes nothing"
    inputs = [[1], [], [2], [3], [4]]
    round = batch.begin(inputs)
    rows.forward(batch, told, inputs)
    round.launch()
    round.resolve([1, 0, 1, 1, 1])
    assert (pool.used, pool.copies) == (8, 3), (
        "the first who writes behind the prefix needs no copy"
    )
    batch.check_integrity()
    del state, round
    batch.filter([1])
    assert (pool.used, batch.nbytes()) == (0, 0)


def test_a_block_that_an_open_round_may_read_is_not_given_out():
    """A row leaves a shared block to its state, the state is dropped, another batch wants a block: what
    was begun before reads the old one. Rounds that overlap without end hold nothing for ever."""
    pool = Pool(BLOCK)
    ended, ahead, block = pool.begin(), pool.begin(), pool.new()
    pool.drop([block])
    pool.end(ended)
    assert pool.used == 0 and pool.new() != block
    later = pool.begin()
    pool.end(ahead)
    assert pool.new() == block
    pool.end(later)
    for _ in range(20):
        pool.drop([pool.new()])
        ahead, ended = pool.begin(), ahead
        pool.end(ended)
    assert len(pool.refs) <= 6


def test_a_window_gives_blocks_back():
    rows = Checked([SLIDING])
    rows.join(0)
    for _ in range(30):
        round = rows.batches[0].begin([[1, 2], [3]])
        rows.forward(rows.batches[0], rows.told[0], [[1, 2], [3]])
        round.launch()
        round.resolve([2, 1])
        rows.told[0] = [rows.told[0][0] + [1, 2], rows.told[0][1] + [3]]
        assert rows.pools[WINDOW].used <= 2 * (WINDOW // BLOCK + 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("cache"))
    return opened(Tiny(Cpu(), family="gemma3", head_size=64, cache_dir=folder))


@pytest.mark.parametrize("codec", ["native", "affine"])
def test_scores_are_those_of_plain_buffers_to_the_bit(target, codec):
    reference = Affine(bits=4) if codec == "affine" else Native()
    policies = [opened(reference), opened(Paged(codec=codec, bits=4, block_tokens=16))]
    both = [policy.rows(target, WIDTH) for policy in policies]
    rng = random.Random(5)
    for rows in both:
        rows.prepare_append([None]).commit()
    for _ in range(40):
        inputs = [[rng.randrange(200) for _ in range(rng.randrange(1, 6))]]
        keep = [rng.randrange(len(inputs[0]) + 1)]
        scores = []
        for rows in both:
            round = rows.begin(inputs)
            scores.append(target.head(target.hidden(round.tokens_BW, round.caches)))
            round.launch(scores[-1])
            round.resolve(keep)
        tolerance = (
            0 if both[0].lengths[0] < 12 else 1e-5
        )  # beyond the window, sums begin elsewhere
        assert mx.allclose(*scores, atol=tolerance, rtol=0)
    assert policies[0].bytes_per_token(target) == policies[1].bytes_per_token(target)
    assert policies[0].coverage(target) == policies[1].coverage(target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_tokens": 0}, "block_tokens: wants 1 to 1,024, got 0"),
        ({"block_tokens": 10**8}, "block_tokens: wants 1 to 1,024, got 100,000,000"),
        ({"codec": "zip"}, "codec: wants native or affine, got 'zip'"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Paged(**settings)


def test_codes_without_a_kernel_or_a_fitting_group(target):
    with pytest.raises(
        ValueError, match="bits: there are kernels for 2, 3, 4, 5, 6 or 8 bits, not for 7"
    ):
        Paged(codec="affine", bits=7)
    with pytest.raises(ValueError, match="group_size: wants 32, 64 or 128, got 48"):
        Paged(codec="affine", group_size=48)
    with pytest.raises(OpenError, match=r"heads of 64 do not divide into groups of 128, in layers"):
        opened(Paged(codec="affine", group_size=128)).rows(target, 2)


def test_requests_with_one_long_prompt_hold_it_once(monkeypatch):
    """The first one fills the blocks, the others find them in the tier, all decode together."""
    prefix, count, answer = prompt_ids(600), 8, 60
    peaks, new = [], Pool.new

    def counting(pool: Pool) -> int:
        block = new(pool)
        peaks.append((engine.stats()["rows"]["active"], pool.used, pool.nbytes()))
        return block

    with serving("kv=paged", "kv.block_tokens=8", "tier=ram", "limits.max_rows=8") as engine:
        parts = engine.pipeline.parts
        (pool,) = engine.exclusive(lambda: parts["kv"].pools(parts["model"])).values()
        engine.generate(prefix, max_tokens=1)
        alone = engine.exclusive(lambda: pool.used)
        assert alone == 600 / 8
        monkeypatch.setattr(Pool, "new", counting)
        prompts = [[*prefix, *prompt_ids(5, seed=n)] for n in range(count)]
        runs = [Running(engine, ids, max_tokens=answer, ignore_eos=True) for ids in prompts]
        assert [run.result()["cached_tokens"] for run in runs] == [600] * count
        rows, blocks, held = max(peaks)
        own = -(-(5 + answer) // 8) + 1  # of each row, and a block that had to be copied
        assert rows == count and blocks <= alone + count * own
        assert held <= 1.07 * (blocks + 1) * pool.block_bytes
        engine.exclusive(parts["tier"][0].clear)
        assert engine.exclusive(lambda: pool.used) == 0, "nothing is left behind"
