"""A drafter's faults cost speculation, never an answer; and where a row is to blame, only its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from pipeline.types import Attachment, Batch, Change, Drafter, DraftRows, Rows, Target, Trust

ROUNDING = 1e-3  # by which a drafter's confidence may miss 0 to 1


@dataclass
class Place(Trust):
    """One row's record. While it is `absent`, an empty row keeps its place: never asked, never fed."""

    absent: bool = False
    faults: int = 0  # not yet booked on its sequence


class GuardedRows:
    """Draft rows that survive their drafter.

    After a fault they propose nothing and take nothing until `mend` has made them again from the
    batch's token lists. Rows that may have caused it are asked and fed one by one from then on, so
    that the next fault is known to be a row's own; that row sits out for a while. `Trust` says how
    long; healthy rounds restore it.
    """

    def __init__(self, make: Callable[[], DraftRows], vocab_size: int):
        self._make, self._vocab_size = make, vocab_size
        self._rows: DraftRows | None = None  # None: they could not be made
        self._places: list[Place] = []
        self._faults: list[str] = []
        self.broken = False
        try:
            self._rows = make()
        except Exception as fault:
            self._fail("making rows", fault, [])

    @property
    def size(self) -> int:
        return len(self._places)

    # --- rounds

    def assign(self, namespaces: Seq[str]) -> None:
        if not self.broken and hasattr(self._rows, "assign"):
            self._try("assign", [], namespaces)

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("prefill", tokens, hidden)

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("commit", inputs, hidden)
        self._pass_round()

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("consume", inputs, hidden)
        self._pass_round()

    def _take(self, method: str, inputs: Seq[Seq[int]], hidden: Any) -> None:
        for group in self._groups():
            if not self.broken:
                mine = [ids if row in group else [] for row, ids in enumerate(inputs)]
                self._try(method, group, mine, hidden)

    def _pass_round(self) -> None:
        for place in self._places:
            place.round()

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """Never raises: rows that a fault concerns get nothing."""
        found: list[list[int]] = [[] for _ in pending]
        for group in self._groups():
            asked = [row for row in group if depths[row]]
            if asked and not self.broken:
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
        change = None if self.broken else self._try("prepare_append", [], tokens, attachments)
        return _Joining(self, change, len(tokens))

    def joined(self, change: Change | None, count: int) -> None:
        self._places += [Place() for _ in range(count)]
        try:
            if change is not None:
                change.commit()
        except Exception as fault:
            self._fail("joining", fault, range(self.size - count, self.size))

    def filter(self, keep: Seq[int]) -> None:
        self._places = [self._places[row] for row in keep]
        if not self.broken:
            self._try("filter", [], keep)

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
        if self._rows is not None:
            self._try("close", [])

    # --- faults

    def mend(self, batch: Batch) -> list[str]:
        """Between rounds: start again what is broken, from what the target's rows hold, and give rows
        whose time is over their place back. Says what has failed since the last time."""
        if self.size != len(batch.sequences):
            return []  # they have not joined yet: a saved state is still being read
        held = [sequence.processed_ids for sequence in batch.sequences]
        try:
            if self.broken and (not held or not all(place.barred for place in self._places)):
                self._remake(held)
            elif not self.broken:
                self._bring_back(held)
        except Exception as fault:
            self._fail("starting again", fault, range(self.size), sure=True)
        told, self._faults = [*self._faults, *self._members_faults()], []
        for sequence, place in zip(batch.sequences, self._places, strict=True):
            if place.faults:
                known = sequence.counts.get("draft_errors", 0)
                sequence.counts["draft_errors"], place.faults = known + place.faults, 0
        return told

    def _members_faults(self) -> list[str]:
        told: list[str] = getattr(self._rows, "faults", list)()
        return told

    def _remake(self, held: Seq[Seq[int]]) -> None:
        self.close()
        self._rows = self._make()
        for row, ids in enumerate(held):
            self._seat(self._rows, row, ids)
        self.broken = False

    def _bring_back(self, held: Seq[Seq[int]]) -> None:
        due = [row for row, p in enumerate(self._places) if p.absent and not p.barred]
        if not due:
            return
        assert self._rows is not None
        order = list(range(self.size))
        for at, row in enumerate(due):
            self._seat(self._rows, row, held[row])
            order[row] = self.size + at
        self._rows.filter(order)
        self.broken = False

    def _seat(self, rows: DraftRows, row: int, ids: Seq[int]) -> None:
        """Row `row` with its tokens at the end; an empty one if its time is not over or it fails."""
        place = self._places[row]
        place.absent = bool(place.barred)
        if not place.absent:
            try:
                rows.prepare_append([ids], [None]).commit()
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
        self._faults.append(f"{where}: {fault!r}")
        logging.getLogger(__name__).warning(
            "the drafter failed (%s); rows %s go on without", where, list(rows), exc_info=fault
        )


class _Joining:
    """New rows; `change` is the drafter's own, None if it has failed: then `mend` makes them."""

    def __init__(self, rows: GuardedRows, change: Change | None, count: int):
        self._rows, self._change, self._count = rows, change, count

    def commit(self) -> None:
        self._rows.joined(self._change, self._count)

    def dispose(self) -> None:
        if self._change is not None:
            self._change.dispose()


def guarded(drafter: Drafter, target: Target, rows: Rows, max_width: int) -> GuardedRows:
    """The drafter's rows for one batch, whose target rows are `rows`."""
    return GuardedRows(lambda: drafting(drafter, target, rows, max_width), target.vocab_size)


def drafting(drafter: Drafter, target: Target, rows: Rows, max_width: int) -> DraftRows:
    """Empty rows that know the target's, where they want to."""
    made = drafter.rows(target, max_width)
    getattr(made, "watch", lambda _: None)(rows)
    return made
