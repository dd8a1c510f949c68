"""Rows of one recurrent layer (gated delta, SSM, short convolution): arrays of a fixed size a row.

Such a layer cannot forget tokens, so nothing here pretends to trim. The arrays of a round's start
are kept (they are immutable, so this costs nothing), and the layer's mixer has told us what it was
given (see `stages.models.loading.mixers`). If a row keeps less than it was asked, those very inputs
go through the mixer again from the kept arrays, with a mask that ends where the row ends: the same
numbers as at first, hence the same state bit for bit, and no second pass through the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from pipeline.types import LayerSpec
from stages.rows.frame import Frame


class Again(Protocol):
    """One call of a mixer, to be made again with other state (`stages.models.loading.mixers.Call`)."""

    @property
    def deaf(self) -> bool:
        """Whether padding gets into the state, whatever mask is given."""

    def masked(self, mask_BW: Any, cache: Any) -> None: ...
    def alone(self, row: int, width: int, cache: Any) -> None: ...


@dataclass
class _Begun:
    """An open round: what was before it and what the mixer was given in it."""

    frame: Frame
    before: list[mx.array]
    calls: list[Again] = field(default_factory=list)


class RecurrentLayout:
    """One layer's cache object, as `mlx_lm.models.cache.ArraysCache` but for all rows. Slots are
    never None: a fresh row has zeros, which is where mlx-lm's models start too."""

    def __init__(self, spec: LayerSpec, max_width: int):
        self.shapes = slots(spec)
        self.max_width = max_width
        self.starts: list[int] = []
        self.now = [mx.zeros((0, *shape), dtype) for shape, dtype in self.shapes]
        self._frame = Frame((), 0)
        self._open: list[_Begun] = []  # oldest first
        self._listening = True

    # --- what the model calls

    def __getitem__(self, slot: int) -> mx.array:
        return self.now[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self.now[slot] = value

    @property
    def lengths(self) -> mx.array | None:
        """Each row's real inputs in this forward, int32 (B,); None where no row is padded."""
        return self._frame.counts

    def make_mask(self, width: int) -> mx.array | None:
        """True (B, W) at real inputs; None where no row is padded."""
        return self._frame.real

    def advance(self, width: int) -> None:
        """Nothing: `lengths` are those of one forward."""

    def record(self, again: Again) -> None:
        """A mixer is about to run. Rounds too wide to be rolled back keep no inputs."""
        if self._listening and self._open and self._frame.width <= self.max_width:
            self._open[-1].calls.append(again)

    # --- rounds

    def begin(self, frame: Frame) -> None:
        self._open.append(_Begun(frame, list(self.now)))
        self._frame = frame

    def launched(self) -> None:
        """The arrays before the round stay until `kept`."""

    def abandon(self) -> None:
        self.now = self._open.pop().before

    def kept(self, keep: Seq[int]) -> None:
        """The oldest round ends; rows that keep less than they were asked go back and forward. Lazy."""
        begun = self._open.pop(0)
        deaf = any(again.deaf for again in begun.calls)
        if tuple(keep) == begun.frame.widths and not (deaf and begun.frame.real is not None):
            return
        assert not self._open, "a round ahead assumed that everything is kept"
        assert begun.calls, f"a round of {begun.frame.width} inputs cannot be rolled back"
        if deaf:
            self.now = self._each_alone(begun, keep)
        else:
            self._together(begun, keep)

    def _together(self, begun: _Begun, keep: Seq[int]) -> None:
        self.now = list(begun.before)
        self._frame = Frame(begun.frame.lengths, begun.frame.width, keep)
        self._listening = False
        for again in begun.calls:
            again.masked(self._frame.real, self)
        self._listening = True

    def _each_alone(self, begun: _Begun, keep: Seq[int]) -> list[mx.array]:
        rows = []
        for row, count in enumerate(keep):
            whole = count == begun.frame.width
            cache = _OneRow([a[row : row + 1] for a in (self.now if whole else begun.before)])
            for again in begun.calls if count and not whole else ():
                again.alone(row, count, cache)
            rows.append(cache.now)
        return [mx.concatenate(list(arrays)) for arrays in zip(*rows, strict=True)]

    def mark(self) -> list[mx.array]:
        return list(self.now)

    def back(self, mark: list[mx.array]) -> None:
        self.now = list(mark)

    # --- membership

    def build(
        self, rows: Seq[Mapping[str, Any] | None], firsts: Seq[int], size: int
    ) -> list[mx.array]:
        """Arrays of the present `size` rows and new ones, whose payload is given, or None. Lazy."""
        return [
            mx.concatenate([self.now[slot][:size], *(self._row(row, slot) for row in rows)])
            for slot in range(len(self.shapes))
        ]

    def _row(self, row: Mapping[str, Any] | None, slot: int) -> mx.array:
        shape, dtype = self.shapes[slot]
        return mx.zeros((1, *shape), dtype) if row is None else row[f"slot{slot}"][None]

    def install(self, built: list[mx.array]) -> None:
        self.now = built

    def filter(self, keep: Seq[int], lengths: Seq[int]) -> None:
        index = mx.array(list(keep), mx.int32)
        self.now = [array[index] for array in self.now]

    def payload(self, row: int, length: int) -> dict[str, mx.array]:
        """The row's arrays without the row axis, as copies: a view would pin all rows. Lazy."""
        return {
            f"slot{slot}": mx.concatenate([array[row : row + 1], array[:0]])[0]
            for slot, array in enumerate(self.now)
        }

    def arrays(self) -> list[mx.array]:
        return list(self.now)

    def check(self, lengths: Seq[int]) -> None:
        for (shape, _), array in zip(self.shapes, self.now, strict=True):
            assert array.shape == (len(lengths), *shape), (array.shape, len(lengths), shape)


class _OneRow:
    """What a mixer takes for a cache when one row runs by itself, without padding."""

    lengths = left_padding = None

    def __init__(self, now: list[mx.array]):
        self.now = now

    def __getitem__(self, slot: int) -> mx.array:
        return self.now[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self.now[slot] = value

    def advance(self, width: int) -> None: ...


def slots(spec: LayerSpec) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Shapes (without the row axis) and types: `recurrent:3x96:float32+2x8x8:float32`."""
    _, _, described = spec.signature.partition(":")
    pairs = (part.split(":") for part in described.split("+"))
    return [(tuple(map(int, shape.split("x"))), getattr(mx, dtype)) for shape, dtype in pairs]
