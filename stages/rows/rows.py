"""All rows of a batch in all layers, and the transactions on them.

The layouts (one a layer) know how a layer's state is stored; `LayeredRows` knows lengths, rounds and
membership. Nothing here depends on how many requests there are: one is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from pipeline.errors import OpenError
from pipeline.types import Change, LayerSlice, LayerSpec, Round, Segment, State
from stages.rows.frame import Frame, capacity
from stages.rows.state import is_exact, layer_range, materialize


class Layout(Protocol):
    """One layer's rows. `begin`, then either `abandon` or `launched` and `kept`, a forward each."""

    starts: list[int]  # earliest position each row holds
    coded_from: int  # states of fewer tokens hold something that longer ones do not

    def begin(self, frame: Frame) -> None: ...
    def launched(self) -> None: ...
    def abandon(self) -> None: ...
    def kept(self, keep: Seq[int]) -> None:
        """The oldest round ends with these inputs kept."""

    def build(self, rows: Seq[Mapping[str, Any] | None], firsts: Seq[int], size: int) -> Any: ...
    def install(self, built: Any) -> None: ...
    def filter(self, keep: Seq[int], lengths: Seq[int]) -> None:
        """Only these rows stay, in this order; `lengths` is what they hold."""

    def reusable_from(self, row: int, length: int) -> int: ...
    def first(self, row: int, length: int) -> int: ...
    def held(self, row: int, first: int, stop: int) -> dict[str, mx.array]: ...
    def arrays(self) -> list[mx.array]: ...
    def check(self, lengths: Seq[int]) -> None: ...


class ExactLayout(Layout, Protocol):
    """A layer that cannot be cut by tokens: its state is that of one length."""

    def payload(self, row: int, length: int) -> dict[str, mx.array]:
        """What a row of `length` tokens needs to go on."""


class LayeredRows:
    """Rows over one layout a layer; `specs` say what each layer is."""

    def __init__(self, layouts: Seq[Layout], specs: Seq[LayerSpec], max_width: int):
        self.layouts = list(layouts)
        self.specs = tuple(specs)
        self.max_width = max_width
        self.caches = grouped(self.layouts, self.specs)
        self.exact: dict[int, Any] = {  # layer -> ExactLayout
            index: layout
            for index, (layout, spec) in enumerate(zip(layouts, specs, strict=True))
            if is_exact(spec)
        }
        self.lengths: list[int] = []
        self.failed = False
        self._open: list[LayeredRound] = []  # oldest first: at most a launched one and one ahead

    @property
    def size(self) -> int:
        return len(self.lengths)

    # --- rounds

    def begin(self, tokens: Seq[Seq[int]]) -> Round:
        assert not self._open, "a round is already open"
        assert len(tokens) == self.size, (len(tokens), self.size)
        widths = [len(row) for row in tokens]
        ids_BW = np.zeros((self.size, max(widths)), np.int32)
        for row, ids in enumerate(tokens):
            ids_BW[row, : len(ids)] = ids
        return self._begin(mx.array(ids_BW), widths, self.lengths)

    def begin_ahead(self) -> Round:
        assert len(self._open) == 1 and self._open[0].is_launched, "nothing to be ahead of"
        tokens_B1 = mx.array(np.zeros((self.size, 1), np.int32))  # evaluated: `feed` writes into it
        expected = [n + w for n, w in zip(self.lengths, self._open[0].widths, strict=True)]
        return self._begin(tokens_B1, [1] * self.size, expected)

    def _begin(self, tokens_BW: mx.array, widths: list[int], lengths: Seq[int]) -> LayeredRound:
        assert not self.failed, "these rows are no longer valid"
        frame = Frame(lengths, tokens_BW.shape[1], widths)
        for layout in self.layouts:
            layout.begin(frame)
        self._open.append(LayeredRound(self, tokens_BW, widths))
        return self._open[-1]

    # --- membership

    def prepare_append(self, states: Seq[State | None]) -> Change:
        """Evaluated before it returns, so that borrowed states may be released."""
        assert not self._open, "membership changes only between rounds"
        lengths = [0 if state is None else len(state.tokens) for state in states]
        built = [self._build(index, states, lengths) for index in range(len(self.layouts))]
        mx.eval(built)
        return Prepared(lambda: self._install(built, lengths))

    def _build(self, index: int, states: Seq[State | None], lengths: Seq[int]) -> Any:
        window = self.specs[index].window
        firsts = [max(0, n - window + 1) if window else 0 for n in lengths]
        if index in self.exact:
            payloads = [s.boundaries[len(s.tokens)][index] if s else None for s in states]
            return self.layouts[index].build(payloads, firsts, self.size)
        held = [n - first for n, first in zip(lengths, firsts, strict=True)]
        room = [capacity(max(held) + 1) - tokens for tokens in held]  # so that it is copied once
        rows = [
            layer_range(state, index, first, n, slots) or None if state is not None else None
            for state, first, n, slots in zip(states, firsts, lengths, room, strict=True)
        ]
        return self.layouts[index].build(rows, firsts, self.size)

    def _install(self, built: list[Any], lengths: list[int]) -> None:
        for layout, new in zip(self.layouts, built, strict=True):
            layout.install(new)
        self.lengths = [*self.lengths, *lengths]

    def filter(self, keep: Seq[int]) -> None:
        assert not self._open, "membership changes only between rounds"
        self.lengths = [self.lengths[row] for row in keep]
        for layout in self.layouts:
            layout.filter(keep, self.lengths)

    # --- going back over several rounds, as a drafter's chain must

    def mark(self) -> list[Any]:
        """What layers that cannot forget hold now. Free: their arrays are immutable."""
        return [layout.mark() for layout in self._lasting()]

    def rewind(self, lengths: Seq[int], mark: Seq[Any]) -> None:
        """Hold only the first `lengths[b]` tokens of each row again: not fewer than at `mark`, less
        than `max_width` behind; exactly those of the mark where layers cannot forget."""
        assert not self._open, "rows go back only between rounds"
        assert all(n <= now for n, now in zip(lengths, self.lengths, strict=True))
        for layout, held in zip(self._lasting(), mark, strict=True):
            layout.back(held)
        self.lengths = list(lengths)

    def _lasting(self) -> list[Any]:
        return [layout for layout in self.exact.values() if hasattr(layout, "mark")]

    @property
    def forgets(self) -> bool:
        """Whether `rewind` may go to any length."""
        return not self._lasting()

    # --- saved state

    def extract(self, row: int, tokens: Seq[int], namespace: str) -> State:
        return self._state(row, tokens, namespace, 0)

    def capture(self, row: int, tokens: Seq[int], namespace: str, start: int = 0) -> State:
        state = self._state(row, tokens, namespace, start)
        mx.eval(state.boundaries)
        return replace(state, segments=tuple(map(materialize, state.segments)))

    def _state(self, row: int, tokens: Seq[int], namespace: str, start: int) -> State:
        stop = len(tokens)
        assert start < stop <= self.lengths[row], (start, stop, self.lengths[row])
        assert not self.exact or stop == self.lengths[row], (stop, self.lengths[row])
        layers: list[LayerSlice | None] = []
        for index, (spec, layout) in enumerate(zip(self.specs, self.layouts, strict=True)):
            if index in self.exact:
                layers.append(None)
                continue
            first = layout.first(row, stop) if spec.window else start
            layers.append(LayerSlice(first, layout.held(row, first, stop)))
        payloads = {index: layout.payload(row, stop) for index, layout in self.exact.items()}
        return State(
            tuple(tokens),
            namespace,
            self.specs,
            (Segment(start, stop, tuple(layers)),),
            {stop: payloads} if payloads else {},
            min_reuse=self.reusable_from(row, stop),
        )

    def reusable_from(self, row: int, length: int) -> int:
        return max((layout.reusable_from(row, length) for layout in self._cut()), default=0)

    def cuttable_later(self, length: int) -> bool:
        delayed = max((layout.coded_from for layout in self._cut()), default=0)
        return length >= delayed and all(spec.kind == "full" for spec in self.specs)

    def _cut(self) -> list[Layout]:
        """Layers that can be cut by tokens."""
        return [layout for index, layout in enumerate(self.layouts) if index not in self.exact]

    def donor(self, layer: int) -> tuple[mx.array, mx.array, Seq[int]] | None:
        show = getattr(self.layouts[layer], "donor", None)
        if show is None:
            raise OpenError("kv: this policy cannot show a drafter the keys of its layers.")
        donated: tuple[mx.array, mx.array, Seq[int]] | None = show(self.lengths)
        return donated

    # --- books

    def arrays(self) -> list[mx.array]:
        return [array for layout in self.layouts for array in layout.arrays()]

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def check_integrity(self) -> None:
        for layout in self.layouts:
            layout.check(self.lengths)
        assert len(self._open) <= 2

    def close(self) -> None:
        self.failed = True
        self.layouts, self.caches, self.exact = [], [], {}


def grouped(layouts: Seq[Layout], specs: Seq[LayerSpec]) -> list[Any]:
    """Cache objects as the model takes them: layouts of one group together, as a tuple."""
    caches: list[Any] = []
    members: dict[int, list[Layout]] = {}
    for layout, spec in zip(layouts, specs, strict=True):
        if spec.group < 0:
            caches.append(layout)
        elif spec.group in members:
            members[spec.group].append(layout)
        else:
            caches.append(members.setdefault(spec.group, [layout]))
    return [tuple(cache) if isinstance(cache, list) else cache for cache in caches]


class LayeredRound:
    """One open round. See `pipeline.types.Round`."""

    def __init__(self, rows: LayeredRows, tokens_BW: mx.array, widths: list[int]):
        self.rows = rows
        self.tokens_BW = tokens_BW
        self.widths = widths
        self.is_launched = False

    @property
    def caches(self) -> Seq[Any]:
        return self.rows.caches

    def columns(self, row: int) -> slice:
        return slice(0, self.widths[row])

    def feed(self, tokens: Seq[int]) -> None:
        """Writes into the evaluated placeholder that the unlaunched graph reads (unified memory)."""
        assert not self.is_launched
        np.asarray(self.tokens_BW)[:, 0] = tokens

    def launch(self, *arrays: mx.array) -> None:
        for layout in self.rows.layouts:
            layout.launched()
        self.is_launched = True
        mx.async_eval(*arrays, *self.rows.arrays())

    def wait(self) -> None:
        mx.eval(self.rows.arrays())

    def resolve(self, keep: Seq[int]) -> None:
        assert self.is_launched and self.rows._open[0] is self, "not the oldest open round"
        assert all(0 <= k <= w for k, w in zip(keep, self.widths, strict=True)), (keep, self.widths)
        for layout in self.rows.layouts:
            layout.kept(keep)
        self.rows.lengths = [n + k for n, k in zip(self.rows.lengths, keep, strict=True)]
        self.rows._open.pop(0)

    def abandon(self) -> None:
        assert not self.is_launched and self.rows._open[-1] is self
        for layout in self.rows.layouts:
            layout.abandon()
        self.rows._open.pop()


class Prepared:
    """A change whose fallible part is done."""

    def __init__(self, install: Callable[[], None]):
        self._install: Callable[[], None] | None = install

    def commit(self) -> None:
        assert self._install is not None, "already committed or disposed"
        self._install()
        self._install = None

    def dispose(self) -> None:
        self._install = None
