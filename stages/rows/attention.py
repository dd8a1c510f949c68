"""Native rows of one attention layer, full or sliding: a buffer (B, H, capacity, D) of keys and one
of values, in the model's own dtype, with every row at its own length.

Slot t of row b holds position `starts[b] + t`. Full layers never move `starts`; sliding layers let
it advance in steps, so that positions stay in temporal order and a rejected burst of up to
`max_width` inputs never destroys what the window still needs. Rollback moves lengths, not data.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from pipeline.types import LayerSpec
from stages.rows.frame import STEP, Frame, capacity

Buffers: TypeAlias = "tuple[mx.array, ...]"  # one a name, each (B, H, capacity, its own size)


class AttentionLayout:
    """One layer's cache object as mlx-lm's models take it (`offset`, `make_mask`, `update_and_fetch`).

    Knows slots and rows, not what lies in them: another encoding of the same tokens has its own
    `names`, `encode` and `fetched`, and inherits the rest.
    """

    names: tuple[str, ...] = ("keys", "values")
    coded_from = 0  # states of fewer tokens hold something that longer ones do not

    def __init__(self, spec: LayerSpec, max_width: int):
        self.window = spec.window
        self.must_hold = spec.window + max_width if spec.window else 0
        self.starts: list[int] = []
        self.buffers: Buffers | None = None  # None until the first token of any row
        self._frame = Frame((), 0)
        self._saved: list[tuple[Buffers | None, list[int]]] = []  # one an open, unlaunched round

    # --- what the model calls

    @property
    def offset(self) -> int | mx.array:
        return self._frame.offset

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of this forward: None or "causal" where they say the same as the full mask."""
        if self.window and window_size not in (None, self.window):
            raise ValueError(
                f"asks for a window of {window_size} of a layer that keeps {self.window}"
            )
        low, stop = self._span()
        window = self.window or window_size or 0
        return self._frame.least_mask(tuple(self.starts), low, stop, window, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the inputs' keys and values (B, H, W, D); return what the queries may need
        (B, H, T, D), in temporal order. Slots of shorter rows are covered by the mask."""
        low, stop = self._span()
        written = self.encode(keys, values)
        self._grow(stop, written)
        assert self.buffers is not None
        lengths = {n - s for n, s in zip(self._frame.lengths, self.starts, strict=True)}
        if len(lengths) == 1:
            at = lengths.pop()
            for buffer, new in zip(self.buffers, written, strict=True):
                buffer[:, :, at : at + new.shape[2]] = new
        else:
            self.buffers = self._scatter(written)
        return self.fetched(tuple(buffer[:, :, low:stop] for buffer in self.buffers))

    # --- what another encoding replaces

    def encode(self, keys: mx.array, values: mx.array) -> Buffers:
        """The arrays (B, H, W, …) to store, one a name. Depends on each token alone."""
        return keys, values

    def fetched(self, stored: Buffers) -> tuple[Any, Any]:
        """Keys and values as this layer's attention takes them."""
        keys, values = stored
        return keys, values

    # --- rounds

    def begin(self, frame: Frame) -> None:
        """Get ready for one forward; what was is kept until `launched` or `abandon`."""
        self._saved.append((self.buffers, list(self.starts)))
        self._frame = frame
        if self.buffers is not None:
            # a fresh array object: `buffer[...] = x` must not write through to the saved one
            self.buffers = tuple(buffer[...] for buffer in self.buffers)
            self._slide()

    def launched(self) -> None:
        """Nothing goes back any more: drop what was kept, so that writes happen in place."""
        self._saved.pop(0)

    def abandon(self) -> None:
        self.buffers, self.starts = self._saved.pop()

    def kept(self, keep: Seq[int]) -> None:
        """Nothing: the rows' lengths say what is held."""

    # --- membership

    def build(
        self, rows: Seq[Mapping[str, Any] | None], firsts: Seq[int], size: int
    ) -> tuple[Buffers | None, list[int]]:
        """Buffers and starts of the present `size` rows and new ones: `rows[i]` holds keys and values
        (H, slots, D) from position `firsts[i]`, or None. Lazy."""
        starts = [*self.starts, *firsts]
        known = [row for row in rows if row is not None]
        if self.buffers is None and not known:
            return None, starts
        sample = [known[0][name] for name in self.names] if known else self._first_row()
        slots = max((row[self.names[0]].shape[1] for row in known), default=0)
        slots = max(slots, self.buffers[0].shape[2] if self.buffers else 0)
        built = []
        for index, (name, like) in enumerate(zip(self.names, sample, strict=True)):
            old = [] if self.buffers is None else [_pad(self.buffers[index], slots)]
            if self.buffers is None and size:
                old = [_zeros(like, size, slots)]
            all_rows = [*old, *(_row(row, name, like, slots) for row in rows)]
            built.append(mx.concatenate(all_rows) if len(all_rows) > 1 else all_rows[0])
        return tuple(built), starts

    def install(self, built: tuple[Buffers | None, list[int]]) -> None:
        self.buffers, self.starts = built

    def filter(self, keep: Seq[int], lengths: Seq[int]) -> None:
        """Slots that only a row which left had need of go with it."""
        self.starts = [self.starts[row] for row in keep]
        if not keep:
            self.buffers = None
        elif self.buffers is not None:
            index = mx.array(list(keep))
            slots = capacity(max(n - s for n, s in zip(lengths, self.starts, strict=True)) + 1)
            self.buffers = tuple(buffer[:, :, :slots][index] for buffer in self.buffers)

    def reusable_from(self, row: int, length: int) -> int:
        """`State.min_reuse` of what is held of a row's first `length` tokens."""
        return 0

    def first(self, row: int, length: int) -> int:
        """Earliest position that is held of them."""
        return self.starts[row]

    def held(self, row: int, first: int, stop: int) -> dict[str, mx.array]:
        """What is stored (H, stop - first, …) of positions [first, stop), by name. Lazy views."""
        if self.buffers is None:
            return {}
        span = slice(first - self.starts[row], stop - self.starts[row])
        return {n: b[row, :, span] for n, b in zip(self.names, self.buffers, strict=True)}

    def donor(self, lengths: Seq[int]) -> tuple[mx.array, mx.array, list[int]] | None:
        """Keys and values (B, H, T, D) of what the rows hold, and each row's first position; None
        before the first token. A round built ahead is not in it, nor is it computed for it."""
        buffers, starts = self._saved[0] if self._saved else (self.buffers, self.starts)
        if buffers is None:
            return None
        stop = max(n - start for n, start in zip(lengths, starts, strict=True))
        return (*self.spelled(tuple(buffer[:, :, :stop] for buffer in buffers)), starts)

    def spelled(self, stored: Buffers) -> tuple[mx.array, mx.array]:
        """Keys and values as the model made them."""
        return stored[0], stored[1]

    def arrays(self) -> list[mx.array]:
        return list(self.buffers or ())

    def check(self, lengths: Seq[int]) -> None:
        assert len(self.starts) == len(lengths), (self.starts, lengths)
        for start, length in zip(self.starts, lengths, strict=True):
            assert start == 0 or (self.window and length - start >= self.window - 1), (
                start,
                length,
            )
            assert self.buffers is None or length - start <= self.buffers[0].shape[2]
        assert self.buffers is None or self.buffers[0].shape[0] == len(lengths)

    # --- inside

    def _span(self) -> tuple[int, int]:
        """Slots [low, stop) that some query of this forward may attend."""
        used = [n - s for n, s in zip(self._frame.lengths, self.starts, strict=True)]
        low = max(0, min(used) - self.window + 1) if self.window else 0
        return low, max(used) + self._frame.width

    def _first_row(self) -> list[mx.array]:
        return [buffer[0] for buffer in self.buffers or ()]

    def _grow(self, stop: int, written: Buffers) -> None:
        slots = capacity(stop)
        if self.buffers is None:
            self.buffers = tuple(_zeros(new[0], new.shape[0], slots) for new in written)
        elif stop > self.buffers[0].shape[2]:
            self.buffers = tuple(_pad(buffer, slots) for buffer in self.buffers)

    def _scatter(self, written: Buffers) -> Buffers:
        assert self.buffers is not None
        slots = self._frame.slots(tuple(self.starts))
        return tuple(
            mx.put_along_axis(
                buffer, mx.broadcast_to(slots, new.shape), new.astype(buffer.dtype), axis=2
            )
            for buffer, new in zip(self.buffers, written, strict=True)
        )

    def _slide(self) -> None:
        """Let rows of a sliding layer forget what no query can need, once it is STEP tokens or more."""
        excess = [
            n - s - self.must_hold for n, s in zip(self._frame.lengths, self.starts, strict=True)
        ]
        if not self.window or max(excess, default=0) < STEP:
            return
        assert self.buffers is not None
        shift = [max(0, e) for e in excess]
        self.starts = [s + d for s, d in zip(self.starts, shift, strict=True)]
        slots = capacity(self.must_hold + self._frame.width)
        last = self.buffers[0].shape[2] - 1
        index = np.minimum(self._shifted(shift, slots), last).astype(np.int32)
        at = mx.array(index[:, None, :, None])
        self.buffers = tuple(
            mx.take_along_axis(b, mx.broadcast_to(at, (*b.shape[:2], slots, b.shape[3])), axis=2)
            for b in self.buffers
        )

    def _shifted(self, shift: Seq[int], slots: int) -> Any:
        """Which slot (B, slots) comes to lie in each."""
        return np.array(shift)[:, None] + np.arange(slots)


def _zeros(like_HTD: mx.array, rows: int, slots: int) -> mx.array:
    return mx.zeros((rows, like_HTD.shape[0], slots, like_HTD.shape[2]), like_HTD.dtype)


def _pad(buffer: mx.array, slots: int) -> mx.array:
    """Grown to `slots` slots. Concatenation took 0.6 of the time of `mx.pad` on a CPU."""
    missing = slots - buffer.shape[2]
    if missing <= 0:
        return buffer
    return mx.concatenate([buffer, _zeros(buffer[0], buffer.shape[0], missing)], axis=2)


def _row(row: Mapping[str, Any] | None, name: str, like_HTD: mx.array, slots: int) -> mx.array:
    return _zeros(like_HTD, 1, slots) if row is None else _pad(row[name][None], slots)
