"""Several drafters in one: the first that has a proposal for a row makes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, OpenError, Problem
from pipeline.identity import digest
from pipeline.types import Attachment, Change, Drafter, DraftRows, Rows, Target, Trust

SCHEMA = "cascade-v1"
Make = Callable[[], DraftRows]


class Member:
    """One member's rows, which may fail: then they propose and take nothing until they are mended,
    later from time to time."""

    def __init__(self, make: Make):
        self.make = make
        self.rows: DraftRows | None = None
        self.drafted = False  # asked in this round
        self.trust = Trust()
        self.told: list[str] = []
        self.watched: Rows | None = None

    def watch(self, target_rows: Rows) -> None:
        """The target's rows, for a member that reads what they hold."""
        self.watched = target_rows
        self._show()

    def _show(self) -> None:
        watch = getattr(self.rows, "watch", None)
        if self.watched is not None and watch is not None:
            watch(self.watched)

    def attempt(self, method: str, *arguments: Any) -> Any:
        """What the method gives; None if it fails, or the rows are lost already."""
        if self.rows is None:
            return None
        try:
            return getattr(self.rows, method)(*arguments)
        except Exception as fault:
            self.lose(f"{method} of a member: {fault!r}")
            return None

    def lose(self, what: str) -> None:
        logging.getLogger(__name__).warning("a member of the cascade failed", exc_info=True)
        self.rows = None
        self.trust.strike()
        self.told.append(what)

    def mend(self, held: Seq[Seq[int]]) -> None:
        """Start again from the tokens that each row holds."""
        if self.rows is not None or self.trust.barred:
            return
        try:
            rows = self.make()
            rows.prepare_append(held, [None] * len(held)).commit()
            self.rows = rows
            self._show()
        except Exception as fault:
            self.lose(f"starting a member again: {fault!r}")


class CascadeRows:
    """`DraftRows` over the members' rows, which all follow the target's. A member that fails costs its
    own proposals: it is made again from the token lists kept here."""

    def __init__(self, namespace: str, makes: Seq[Make]):
        self._namespace = namespace
        self._members = [Member(make) for make in makes]
        self._held: list[list[int]] = []
        self._mend()

    @property
    def size(self) -> int:
        return len(self._held)

    def watch(self, target_rows: Rows) -> None:
        for member in self._members:
            member.watch(target_rows)

    def assign(self, namespaces: Seq[str]) -> None:
        for member in self._members:
            if hasattr(member.rows, "assign"):
                member.attempt("assign", namespaces)

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("prefill", tokens, hidden)
        self._mend()

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("", inputs, hidden)
        self._pass_round()

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self._take("consume", inputs, hidden)
        self._pass_round()

    def _pass_round(self) -> None:
        for member in self._members:
            member.trust.round()
        self._mend()

    def faults(self) -> list[str]:
        """What members have failed with since the last time."""
        told = [what for member in self._members for what in member.told]
        for member in self._members:
            member.told = []
        return told

    def _take(self, name: str, tokens: Seq[Seq[int]], hidden: Any) -> None:
        for member in self._members:
            method = name or ("commit" if member.drafted else "consume")
            member.attempt(method, tokens, hidden)
            member.drafted = False
        for held, ids in zip(self._held, tokens, strict=True):
            held += ids

    def _mend(self) -> None:
        for member in self._members:
            member.mend(self._held)

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """Members are asked in order, each for the rows that have no proposal yet."""
        found: list[list[int]] = [[] for _ in pending]
        for member in self._members:
            left = [0 if ids else depth for ids, depth in zip(found, depths, strict=True)]
            if not any(left):
                break
            member.drafted = True
            proposals = member.attempt("draft", pending, left, samplers)
            for row, ids in enumerate(proposals or ()):
                found[row] = found[row] or ids
        return found

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        """Each member gets its own attachments back, by their schema."""
        parts = [[_part(a, index) for a in attachments] for index in range(len(self._members))]
        changes = [
            member.attempt("prepare_append", tokens, own)
            for member, own in zip(self._members, parts, strict=True)
        ]
        return _Appended(self, [list(ids) for ids in tokens], changes)

    def joined(self, fresh: list[list[int]], changes: Seq[Change | None]) -> None:
        self._held += fresh
        for member, change in zip(self._members, changes, strict=True):
            member.trust.barred = 0  # new rows are worth a new attempt
            if change is None:
                member.rows = None  # it could not prepare: it starts again with all rows
            else:
                change.commit()
        self._mend()

    def filter(self, keep: Seq[int]) -> None:
        for member in self._members:
            member.attempt("filter", keep)
        self._held = [self._held[row] for row in keep]
        self._mend()

    def capture(self, row: int) -> Attachment | None:
        """The members' attachments in one: their tensors one after the other."""
        own = [member.attempt("capture", row) for member in self._members]
        return _joined(self._namespace, own) if any(own) else None

    def check_integrity(self) -> None:
        for member in self._members:
            if member.rows is not None:
                assert member.rows.size == self.size, (member.rows.size, self.size)
                member.rows.check_integrity()

    def close(self) -> None:
        for member in self._members:
            member.attempt("close")
        self._held = []


class _Appended:
    """Rows prepared in all members."""

    def __init__(self, rows: CascadeRows, fresh: list[list[int]], changes: list[Change | None]):
        self._rows, self._fresh, self._changes = rows, fresh, changes

    def commit(self) -> None:
        self._rows.joined(self._fresh, self._changes)

    def dispose(self) -> None:
        for change in self._changes:
            if change is not None:
                change.dispose()


def _joined(namespace: str, own: Seq[Attachment | None]) -> Attachment:
    metadata: dict[str, str | int | float | bool] = {}
    for index, part in enumerate(own):
        if part is not None:
            facts: dict[str, str | int] = {
                "namespace": part.namespace,
                "schema": part.schema,
                "tensors": len(part.tensors),
            }
            metadata |= {f"{index}.{key}": value for key, value in facts.items()}
            metadata |= {f"{index}.of.{key}": value for key, value in part.metadata.items()}
    tensors = [tensor for part in own if part for tensor in part.tensors]
    return Attachment(namespace, SCHEMA, metadata, (*tensors,))


def _part(whole: Attachment | None, index: int) -> Attachment | None:
    """The attachment of member `index`, as it was when it was joined."""
    if whole is None or whole.schema != SCHEMA or f"{index}.schema" not in whole.metadata:
        return None
    facts = whole.metadata
    before = sum(int(facts.get(f"{i}.tensors", 0)) for i in range(index))
    start = f"{index}.of."
    own = {key.removeprefix(start): v for key, v in facts.items() if key.startswith(start)}
    tensors = whole.tensors[before : before + int(facts[f"{index}.tensors"])]
    return Attachment(str(facts[f"{index}.namespace"]), str(facts[f"{index}.schema"]), own, tensors)


class Cascade:
    """Asks its members in order; a row takes the first proposal that is not empty.

    Cheap and sure ones first: `[grammar, suffix, two_model]`. All members follow every row whoever
    drafts, so each must take tokens that another one proposed ("external"). At most one may look into
    the target (taps). ConfigError and OpenError name the member that does not fit.
    """

    def __init__(self, order: list[Drafter]):
        self.members = order
        if not order:
            raise ConfigError(
                [Problem("drafter.order", "names nobody.", "Try: 'drafter.order=[ngram,suffix]'")]
            )
        closed = [m.namespace for m in order if len(order) > 1 and "external" not in m.can]
        if closed:
            what = f"{', '.join(closed)} cannot follow tokens that another drafter proposed."
            raise ConfigError(
                [Problem("drafter.order", what, "Use it alone, without a cascade: drafter=NAME.")]
            )
        self.can = frozenset.intersection(*(frozenset(member.can) for member in order))
        self.prefill = "full" if any(member.prefill == "full" for member in order) else "tail"

    @property
    def needs(self) -> Mapping[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for member in self.members:
            for group, abilities in getattr(member, "needs", {}).items():
                found[group] = found.get(group, frozenset()) | frozenset(abilities)
        return found

    @property
    def namespace(self) -> str:
        return f"cascade:{digest({'members': [m.namespace for m in self.members]})}"

    @property
    def taps(self) -> Seq[int]:
        return next(iter(self._tapping()), ())

    def _tapping(self) -> Iterator[Seq[int]]:
        return (member.taps for member in self.members if member.taps)

    @property
    def weight_bytes(self) -> int:
        return sum(getattr(member, "weight_bytes", 0) for member in self.members)

    @property
    def bytes_per_token(self) -> float:
        return sum(getattr(member, "bytes_per_token", 0.0) for member in self.members)

    def files(self) -> dict[str, Path]:
        """Those of members that read any."""
        read = [member.files() for member in self.members if hasattr(member, "files")]
        return {name: path for files in read for name, path in files.items()}

    def open(self) -> None:
        for member in self.members:
            member.open()
        if len(list(self._tapping())) > 1:
            self.close()
            raise OpenError("drafter.order: only one member may look into the target (taps).")

    def close(self) -> None:
        """Every member, even if another fails; then the first failure goes on."""
        failures = []
        for member in reversed(self.members):
            try:
                member.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def learn(self, namespace: str, ids: Seq[int]) -> None:
        for member in self.members:
            getattr(member, "learn", _forget)(namespace, ids)

    def rows(self, target: Target, max_width: int) -> DraftRows:
        makes = [lambda member=member: member.rows(target, max_width) for member in self.members]
        return CascadeRows(self.namespace, makes)


def _forget(namespace: str, ids: Seq[int]) -> None:
    """What a member does with an answer that does not remember any."""
