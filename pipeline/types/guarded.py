"""A drafter's faults cost speculation, never an answer; and where a row is to blame, only its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from pipeline.types.parts import Change, DraftRows, Rows
from pipeline.types.sequence import Attachment, Owner
from pipeline.types.trust import Trust

ROUNDING = 1e-3  # by which a drafter's confidence may miss 0 to 1


@dataclass(frozen=True)
class Fault:
    """What a drafter has failed with, and the rows that it concerned then."""

    where: str
    error: Exception
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.error!r}"


@dataclass
class Place(Trust):
    """One row's record. While it is `absent`, an empty row keeps its place: never asked, never fed."""

    ids: list[int] = field(default_factory=list)  # what the target's row holds
    start: Attachment | None = None  # to begin from, where the drafter could not take it yet
    absent: bool = False
    faults: int = 0  # not yet told


class GuardedRows:
    """Draft rows that survive their drafter: nothing that is asked of them fails.

    After a fault they are made again: each row from what the lost rows still know of it, where that
    is as long as the row, else from its ids. Rows that may have caused it are asked and fed one by
    one from then on, so that the next fault is known to be a row's own; that row sits out for a
    while. `Trust` says how long; healthy rounds restore it.
    """

    def __init__(self, make: Callable[[], DraftRows], vocab_size: int, name: str = ""):
        self._make, self._vocab_size, self._name = make, vocab_size, name
        self._rows: DraftRows | None = None  # None: they could not be made
        self._watched: Rows | None = None
        self._places: list[Place] = []
        self._faults: list[Fault] = []
        self._drafted = False  # these rows were asked in this round
        self.broken = True
        self._mend()

    @property
    def size(self) -> int:
        return len(self._places)

    def watch(self, target_rows: Rows) -> None:
        """The target's rows, for a drafter that reads what they hold."""
        self._watched = target_rows
        try:
            self._show()
        except Exception as fault:
            self._fail("watch", fault, [])

    # --- rounds

    def assign(self, owners: Seq[Owner]) -> None:
        if not self.broken:
            self._try("assign", [], owners)

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("prefill", tokens, hidden)
        self._mend()

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("commit", inputs, hidden)
        self._pass_round()

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("consume", inputs, hidden)
        self._pass_round()

    def _take(self, method: str, inputs: Seq[Seq[int]], hidden: Any) -> None:
        """Group by group; after a fault the others' rows are made again first, as they were."""
        groups = self._groups()
        for group in [*groups, [row for row, p in enumerate(self._places) if p.absent]]:
            if self.broken:
                self._mend()
            present = [row for row in group if not self._places[row].absent]
            if present and not self.broken:
                mine = [ids if row in present else [] for row, ids in enumerate(inputs)]
                self._try(self._way(method), present, mine, hidden)
            for row in group:
                self._places[row].ids += inputs[row]
        self._drafted = False

    def _way(self, method: str) -> str:
        """Rows that were not asked in this round, or not these, have nothing to commit."""
        return "consume" if method == "commit" and not self._drafted else method

    def _pass_round(self) -> None:
        for place in self._places:
            place.round()
        self._mend()

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """Rows that a fault concerns get nothing."""
        found: list[list[int]] = [[] for _ in pending]
        for group in self._groups():
            asked = [row for row in group if depths[row]]
            if asked and not self.broken:
                self._drafted = True
                mine = [depth if row in asked else 0 for row, depth in enumerate(depths)]
                proposals = self._try("draft", asked, pending, mine, samplers)
                if proposals is not None and len(proposals) != len(pending):
                    what = ValueError(f"{len(proposals)} proposals for {len(pending)} rows")
                    self._fail("draft", what, asked)
                elif proposals is not None:
                    found = self._taken(found, proposals, asked, depths)
        return found

    def _taken(self, found: list[list[int]], given: Any, rows: Seq[int], depths: Seq[int]) -> Any:
        """`found` with what these rows were given, where it can be."""
        for row in rows:
            if self._possible(row, given[row], depths[row]):
                found[row] = given[row]
        return found

    def _possible(self, row: int, proposal: list[int], depth: int) -> bool:
        """One that cannot be costs its row alone: it is taken out, and the others' rows go on."""
        inside = all(0 <= token < self._vocab_size for token in proposal)
        said = getattr(proposal, "confidence", ())
        chances = all(-ROUNDING <= chance <= 1 + ROUNDING for chance in said)  # NaN is none
        if inside and len(proposal) <= depth and chances:
            return True
        what = f"proposed {proposal} at depth {depth}, with the confidence {list(said)}"
        self._tell("draft", ValueError(what), [row])
        self._places[row].absent = True
        return False

    def _groups(self) -> list[list[int]]:
        """Rows that are asked and fed together: all that are trusted, the others each alone."""
        present = [(row, place) for row, place in enumerate(self._places) if not place.absent]
        trusted = [row for row, place in present if not place.strikes]
        alone = [[row] for row, place in present if place.strikes]
        return [trusted, *alone] if trusted else alone

    # --- membership

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        if self.broken:
            self._mend()
        change = None if self.broken else self._try("prepare_append", [], tokens, attachments)
        pairs = zip(tokens, attachments, strict=True)
        return _Joining(self, change, [Place(ids=list(ids), start=start) for ids, start in pairs])

    def joined(self, change: Change | None, places: list[Place]) -> None:
        """If it cannot be swapped in, or there is none, all rows are made again."""
        known = self.size
        self._places += places
        try:
            if change is not None:
                change.commit()
        except Exception as fault:
            self._fail("joining", fault, range(known, self.size))
        for place in () if self.broken else places:
            place.start = None
        self._mend()

    def filter(self, keep: Seq[int]) -> None:
        self._places = [self._places[row] for row in keep]
        if not self.broken:
            self._try("filter", [], keep)
        if self.broken:
            self._drop()  # which of its rows is whose is not known any more
        self._mend()

    def capture(self, row: int) -> Attachment | None:
        if self.broken or self._places[row].absent:
            return None
        found: Attachment | None = self._try("capture", [row], row)
        return found

    def check_integrity(self) -> None:
        if self._rows is not None and not self.broken:
            assert self._rows.size == self.size, (self._rows.size, self.size)
            self._rows.check_integrity()

    def close(self) -> None:
        self._drop()
        self._places, self.broken = [], True

    def _drop(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            try:
                rows.close()
            except Exception as fault:
                self._fail("close", fault, [])

    # --- faults

    def faults(self) -> tuple[list[Fault], list[int]]:
        """What has failed since the last time, each once, and how many of them concerned each row."""
        told, inner = self._faults, getattr(self._rows, "faults", None)
        counts, self._faults = [place.faults for place in self._places], []
        for place in self._places:
            place.faults = 0
        if inner is not None and not self.broken:
            more, by_row = inner()
            told, counts = [*told, *more], [a + b for a, b in zip(counts, by_row, strict=True)]
        return told, counts

    def _mend(self) -> None:
        """Between rounds: start again what is broken, and give rows whose time is over their place
        back."""
        try:
            if not self.broken:
                self._bring_back()
            elif not self._places or not all(place.barred for place in self._places):
                self._remake()
        except Exception as fault:
            self._fail("making rows", fault, range(self.size), sure=True)
            self._drop()

    def _remake(self) -> None:
        starts = [self._rescued(row) for row in range(self.size)]
        self._drop()
        self._rows = self._make()
        self._show()
        for row, start in enumerate(starts):
            self._seat(self._rows, row, start)
        self.broken = self._drafted = False

    def _show(self) -> None:
        watch = getattr(self._rows, "watch", None)
        if self._watched is not None and watch is not None:
            watch(self._watched)

    def _rescued(self, row: int) -> Attachment | None:
        """What the lost rows still know of a row whose tokens alone would not bring it back."""
        place = self._places[row]
        if place.start is not None or self._rows is None or place.absent:
            return place.start
        try:
            found = self._rows.capture(row)
            if found is not None:
                self._rows.check_integrity()
            return found
        except Exception:
            return None  # it starts cold

    def _bring_back(self) -> None:
        due = [row for row, p in enumerate(self._places) if p.absent and not p.barred]
        if not due:
            return
        assert self._rows is not None
        order = list(range(self.size))
        for at, row in enumerate(due):
            self._seat(self._rows, row, None)
            order[row] = self.size + at
        self._rows.filter(order)
        self.broken = False

    def _seat(self, rows: DraftRows, row: int, start: Attachment | None) -> None:
        """Row `row` with its tokens at the end; an empty one if its time is not over or it fails."""
        place = self._places[row]
        place.absent, place.start = bool(place.barred), None
        if not place.absent:
            try:
                rows.prepare_append([place.ids], [start]).commit()
            except Exception as fault:
                self._fail("prepare_append", fault, [row])
                place.absent = True
        if place.absent:
            rows.prepare_append([[]], [None]).commit()

    def _try(self, method: str, rows: Seq[int], *arguments: Any) -> Any:
        """What the drafter's method gives; None if it fails, which these rows may have caused."""
        try:
            return getattr(self._rows, method)(*arguments)
        except Exception as fault:
            self._fail(method, fault, rows)

    def _fail(self, where: str, fault: Exception, rows: Seq[int], *, sure: bool = False) -> None:
        self.broken = True
        self._tell(where, fault, rows, sure=sure)

    def _tell(self, where: str, fault: Exception, rows: Seq[int], *, sure: bool = False) -> None:
        for place in (self._places[row] for row in rows):
            place.faults += 1
            if sure or len(rows) == 1:
                place.strike()
            else:
                place.suspect()
        self._faults.append(Fault(f"{self._name} {where}".strip(), fault, (*rows,)))


class _Joining:
    """New rows; `change` is the drafter's own, None if it has failed: then they are made with all."""

    def __init__(self, rows: GuardedRows, change: Change | None, places: list[Place]):
        self._rows, self._change, self._places = rows, change, places

    def commit(self) -> None:
        self._rows.joined(self._change, self._places)

    def dispose(self) -> None:
        if self._change is not None:
            self._change.dispose()
