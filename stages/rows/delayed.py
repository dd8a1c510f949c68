"""Rows of one attention layer that is coded from a position on (delayed quantization).

A query before `start` reads keys and values as the model made them, one from `start` on reads codes,
of all that is before it: a function of the query's position alone, so neither chunks, drafts,
neighbours nor reuse change a number. A young row has both, codes and the other, which it drops once no
query can ask for it any more; no row is ever converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from pipeline.types import LayerSpec
from stages.rows.attention import AttentionLayout
from stages.rows.codes import Codec
from stages.rows.frame import Frame
from stages.rows.quantized import Attend, Fetched, QuantizedLayout


class DelayedLayout(QuantizedLayout):
    """`QuantizedLayout` and, for rows of fewer than `start` tokens (and what a chain of drafts may go
    back over), an `AttentionLayout` beside it. The target must ask `attend`."""

    def __init__(self, spec: LayerSpec, max_width: int, keys: Codec, values: Codec, start: int):
        super().__init__(spec, max_width, keys, values)
        self.coded_from, self.until = start, start + max_width
        self.young: list[bool] = []  # rows that have both
        self.early = AttentionLayout(spec, max_width)
        self._asked: list[Frame] = []  # open rounds, oldest first
        self._writes = False  # whether some row of the newest one is young

    # --- what the model calls

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        late = super().update_and_fetch(keys, values)
        frame = self._frame
        ends = [n + w for n, w in zip(frame.lengths, frame.widths, strict=True)]
        early = self.early.update_and_fetch(keys, values) if self._writes else None
        if min(frame.lengths) >= self.coded_from:
            return late
        assert early is not None
        attend = _Attend(self, frame, early, late, max(ends) > self.coded_from)
        return Fetched(early, attend), early[1]

    # --- rounds

    def begin(self, frame: Frame) -> None:
        """Rows that are no longer young write where nobody reads."""
        super().begin(frame)
        young = [is_ and n < self.until for is_, n in zip(self.young, frame.lengths, strict=True)]
        rows = zip(young, frame.lengths, self.early.starts, strict=True)
        lengths = [n if is_young else first for is_young, n, first in rows]
        self._asked.append(frame)
        self._writes = any(young)
        self.early.begin(Frame(lengths, frame.width, frame.widths))
        if not self._writes:
            self.early.buffers = None

    def launched(self) -> None:
        super().launched()
        self.early.launched()

    def abandon(self) -> None:
        super().abandon()
        self.early.abandon()
        self._asked.pop()

    def kept(self, keep: Seq[int]) -> None:
        held = zip(self.young, self._asked.pop(0).lengths, keep, strict=True)
        self.young = [young and n + k < self.until for young, n, k in held]
        if not any(self.young):
            self.early.buffers = None

    # --- membership and saved state

    def build(self, rows: Seq[Mapping[str, Any] | None], firsts: Seq[int], size: int) -> Any:
        """A row may come as it is stored before `start`, or as codes."""
        young = [row is None or self.early.names[0] in row for row in rows]
        coded = [self._coded(row) for row in rows]
        plain = [row if new else None for row, new in zip(rows, young, strict=True)]
        early = self.early.build(plain, firsts, size)
        return super().build(coded, firsts, size), early, [*self.young, *young]

    def _coded(self, row: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        if row is None or self.names[0] in row:
            return row
        packed = self.encode(*(row[name][None] for name in self.early.names))
        return {name: array[0] for name, array in zip(self.names, packed, strict=True)}

    def install(self, built: Any) -> None:
        coded, early, self.young = built
        super().install(coded)
        self.early.install(early)

    def filter(self, keep: Seq[int], lengths: Seq[int]) -> None:
        super().filter(keep, lengths)
        self.young = [self.young[row] for row in keep]
        firsts = [self.early.starts[row] for row in keep]
        held = zip(self.young, lengths, firsts, strict=True)
        self.early.filter(keep, [n if young else first for young, n, first in held])
        if not any(self.young):
            self.early.buffers = None

    def reusable_from(self, row: int, length: int) -> int:
        """Before `start` a state is of use at any length; later only from `start` on."""
        return 0 if self.young[row] and length < self.coded_from else self.coded_from

    def first(self, row: int, length: int) -> int:
        """Earliest position that a state of `length` tokens of this row has."""
        return (self if self.reusable_from(row, length) else self.early).starts[row]

    def held(self, row: int, first: int, stop: int) -> dict[str, mx.array]:
        if self.reusable_from(row, stop):
            return super().held(row, first, stop)
        return self.early.held(row, first, stop)

    def arrays(self) -> list[mx.array]:
        return [*super().arrays(), *self.early.arrays()]

    def check(self, lengths: Seq[int]) -> None:
        super().check(lengths)
        assert len(self.young) == len(self.early.starts) == len(lengths)
        for young, first, length in zip(self.young, self.early.starts, lengths, strict=True):
            assert young or length >= self.coded_from, (length, self.coded_from)
            assert not young or first == 0 or length - first >= self.window - 1, (first, length)


class _Attend:
    """Attention of one forward whose queries lie before `start`, all or some."""

    def __init__(self, layout: DelayedLayout, frame: Frame, early: Any, late: Any, both: bool):
        self.layout, self.frame = layout, frame
        self.early, self.late, self.both = early, late, both

    def __call__(
        self, plain: Attend, queries: mx.array, *_: Any, mask: Any = None, **__: Any
    ) -> mx.array:
        keys, values = self.early
        early = plain(queries, keys, values, mask=self._mask(mask, keys.shape[2]))
        if not self.both:
            return early
        keys, values = self.late
        ask = getattr(keys, "attend", None)
        late = ask(plain, queries, keys, values) if ask else plain(queries, keys, values)
        at_BW = np.array(self.frame.lengths)[:, None] + np.arange(self.frame.width)
        return mx.where(mx.array((at_BW < self.layout.coded_from)[:, None, :, None]), early, late)

    def _mask(self, mask: Any, keys: int) -> Any:
        """The part of a full layer's mask that tells of so many keys; a window's slots are its own."""
        if self.layout.window:
            return self.layout.early.make_mask(self.frame.width)
        return mask[..., :keys] if isinstance(mask, mx.array) else mask
