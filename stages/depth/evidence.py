"""What a depth learns while it runs: how often drafts are right, and what a pass of a width costs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from statistics import median
from typing import Any

from pipeline.types import Sequence

SAMPLES = 15  # of a cost: the latest
SURE = 3  # samples; one or two may have met an interruption, or what a width costs only once
SLOPE = 0.1  # of a pass over one token: what one more is taken to cost until it has been measured
REACH = 8  # columns on, where that is said
FADE = 0.8  # a round's weight after the next one with drafts
WEIGHT = 2.0  # rounds that what is known beforehand counts for
MOST_LOST = 0.25  # of a plain round: no more is believed to be lost after a wide one
LESSON = 0.97  # a wide round's weight after the next one, where promises are compared with outcomes
BELIEF = 8.0  # what the forecast itself counts for, in plain rounds' worth of tokens
REGAINED = 0.005  # of the distance to full belief, each time that a proposal is refused


class Odds:
    """How likely draft i is right, given that those before it were: one figure for the first, one for
    all others. A new row begins with what all rows have shown; its own rounds outweigh that soon, and
    old rounds fade."""

    def __init__(self, pooled: Odds | None = None):
        first, later = pooled.rates if pooled else (0.6, 0.8)
        self._right, self._seen = [first * WEIGHT, later * WEIGHT], [WEIGHT, WEIGHT]

    def note(self, verified: int, accepted: int, fade: float = FADE) -> None:
        """A round in which `accepted` of `verified` > 0 drafts were right. Those after the first wrong
        one say nothing."""
        judged = min(verified, accepted + 1)
        counts = ((min(accepted, 1), 1), (max(0, accepted - 1), judged - 1))
        for index, (right, seen) in enumerate(counts):
            if seen:
                self.judge(index, right, seen, fade)

    def judge(self, index: int, right: int, seen: int, fade: float = FADE) -> None:
        """Of `seen` drafts that were first ones (index 0) or later ones (1), how many were right."""
        self._right[index] = self._right[index] * fade + right
        self._seen[index] = self._seen[index] * fade + seen

    @property
    def rates(self) -> tuple[float, float]:
        first, later = (r / s for r, s in zip(self._right, self._seen, strict=True))
        return first, later

    def expected(self, length: int) -> Iterator[float]:
        """Expected tokens of a round with 0, 1, … `length` drafts, the target's own included."""
        reached, (rate, later), tokens = 1.0, self.rates, 1.0
        for _ in range(length):
            yield tokens
            reached *= rate
            tokens, rate = tokens + reached, later
        yield tokens


class Costs:
    """Seconds by (rows, width). A width's own figure is the least of its latest samples, since other
    work on the machine only adds to it. Neighbours say as much as a width does itself: a line through
    all of them is the other half. One seen less than `SURE` times counts for no more than the line
    says: being wrong about that costs few rounds, never trying it again may cost many. Of a number
    of rows never seen: the nearest one's."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, deque[float]]] = {}
        self._lines: dict[int, tuple[float, float]] = {}

    def note(self, rows: int, width: int, seconds: float) -> None:
        seen = self._seen.setdefault(rows, {})
        seen.setdefault(width, deque(maxlen=SAMPLES)).append(seconds)
        self._lines[rows] = _line(seen, SLOPE * rows / (1 + SLOPE * (rows - 1)))

    def of(self, rows: int, width: int, unknown: float = 0.0) -> float:
        """Seconds; `unknown` where nothing at all has been measured."""
        if not self._seen:
            return unknown
        nearest = min(self._seen, key=lambda known: abs(known - rows))
        start, rise = self._lines[nearest]
        likely, own = start + rise * (width - 1), self._seen[nearest].get(width, ())
        if len(own) < SURE:
            return min(likely, *own) if own else likely
        return min(own) if width == 1 else (min(own) + likely) / 2


def _line(seen: Mapping[int, Collection[float]], slope: float) -> tuple[float, float]:
    """Seconds of width 1 and of each further column: least squares over what is sure, or over all; and
    over one more point, as much as is sure, by which a column costs `slope` of a narrow pass. No pass
    costs more than as many narrow ones: that bounds the line where a slow sample would tilt it."""
    sure = {w: some for w, some in seen.items() if len(some) >= SURE} or seen
    points = [(w - 1, min(some), len(some)) for w, some in sure.items()]
    narrow, seconds, _ = min(points)
    unit = seconds / (1 + slope * narrow)
    points.append((narrow + REACH, seconds + slope * unit * REACH, SURE))
    total = sum(n for _, _, n in points)
    mean_x = sum(x * n for x, _, n in points) / total
    mean_y = sum(y * n for _, y, n in points) / total
    spread = sum(n * (x - mean_x) ** 2 for x, _, n in points)
    rise = max(0.0, sum(n * (x - mean_x) * (y - mean_y) for x, y, n in points) / spread)
    start = max(mean_y - rise * mean_x, min(y / (x + 1) for x, y, _ in points))
    return start, (mean_y - start) / mean_x


class Plain:
    """Seconds of rounds without drafts, by rows: of those that follow another one, and of those that
    follow a wide one, which has undone what was prepared for them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[deque[float], deque[float]]] = {}

    def note(self, rows: int, seconds: float, *, after_wide: bool) -> None:
        known = self._seen.setdefault(rows, (deque(maxlen=SAMPLES), deque(maxlen=SAMPLES)))
        known[after_wide].append(seconds)

    def usual(self, rows: int, unknown: float) -> float:
        """Not the least, as in `Costs`: what a round really takes, with what else the machine does."""
        plain, _ = self._seen.get(rows, ((), ()))
        return median(plain) if plain else unknown

    def lost(self, rows: int) -> float:
        """What a wide round takes from the plain one after it, in plain rounds: as measured at the
        nearest number of rows; 0 until it has been."""
        both = {n: pair for n, pair in self._seen.items() if min(map(len, pair)) >= SURE}
        if not both:
            return 0.0
        plain, after = both[min(both, key=lambda known: abs(known - rows))]
        return min(MOST_LOST, max(0.0, median(after) / median(plain) - 1))


class Worth:
    """What a promised gain turns out to be worth, at most what was promised: the best of several
    guesses is oftener too high than too low, and what the costs above leave out counts here too."""

    def __init__(self) -> None:
        self._promised = self._had = BELIEF

    def note(self, promised: float, had: float) -> None:
        """A wide round; both are tokens a second in units of plain decoding's."""
        self._promised = self._promised * LESSON + promised
        self._had = self._had * LESSON + had

    def refused(self) -> None:
        """What was learned of other proposals says less and less."""
        self._had += REGAINED * max(0.0, self._promised - self._had)

    @property
    def share(self) -> float:
        return min(1.0, self._had / self._promised)


class RowNotes:
    """Something kept for each sequence while it lives."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Sequence], Any]] = {}

    def get(self, sequence: Sequence, default: Any) -> Any:
        """The sequence's note; `default` is taken for it from now on if there is none."""
        key = id(sequence)
        if key not in self._notes:
            forget = weakref.ref(sequence, lambda _: self._notes.pop(key, None))
            self._notes[key] = (forget, default)
        return self._notes[key][1]
