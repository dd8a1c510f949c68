"""Several drafters in one: the first that has a proposal for a row makes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, OpenError, Problem
from pipeline.identity import digest
from pipeline.types import (
    Attachment,
    Change,
    Drafter,
    DraftRows,
    Fault,
    GuardedRows,
    Owner,
    Rows,
    Target,
)

SCHEMA = "cascade-v1"


class CascadeRows:
    """`DraftRows` over the members' rows, which all follow the target's and survive their members'
    faults: a row that one of them fails on is the others' to draft for."""

    def __init__(self, namespace: str, members: Seq[GuardedRows], follow: Seq[bool]):
        """`follow`: which members draft for rows that wear adapters, too."""
        self._namespace, self._members, self._follow = namespace, members, follow
        self._adapted = frozenset[int]()

    @property
    def size(self) -> int:
        return self._members[0].size

    def watch(self, target_rows: Rows) -> None:
        for member in self._members:
            member.watch(target_rows)

    def assign(self, owners: Seq[Owner]) -> None:
        self._adapted = frozenset(row for row, owner in enumerate(owners) if owner.adapted)
        for member in self._members:
            member.assign(owners)

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        for member in self._members:
            member.prefill(tokens, hidden)

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        for member in self._members:
            member.commit(inputs, hidden)

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        for member in self._members:
            member.consume(inputs, hidden)

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        """Members are asked in order, each for the rows that have no proposal yet and that it can follow."""
        found: list[list[int]] = [[] for _ in pending]
        for member, follows in zip(self._members, self._follow, strict=True):
            left = [0 if ids else depth for ids, depth in zip(found, depths, strict=True)]
            if not follows:
                left = [0 if row in self._adapted else n for row, n in enumerate(left)]
            if not any(left):
                continue
            for row, ids in enumerate(member.draft(pending, left, samplers)):
                found[row] = found[row] or ids
        return found

    def faults(self) -> tuple[list[Fault], list[int]]:
        """The members', as `GuardedRows` tells them."""
        told = [member.faults() for member in self._members]
        by_row = zip(*(counts for _, counts in told), strict=True)
        return [fault for faults, _ in told for fault in faults], [sum(row) for row in by_row]

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        """Each member gets its own attachments back, by their schema."""
        return _Appended(
            [
                member.prepare_append(tokens, [_part(whole, index) for whole in attachments])
                for index, member in enumerate(self._members)
            ]
        )

    def filter(self, keep: Seq[int]) -> None:
        for member in self._members:
            member.filter(keep)

    def capture(self, row: int) -> Attachment | None:
        """The members' attachments in one: their tensors one after the other."""
        own = [member.capture(row) for member in self._members]
        return _joined(self._namespace, own) if any(own) else None

    def check_integrity(self) -> None:
        for member in self._members:
            assert member.size == self.size, (member.size, self.size)
            member.check_integrity()

    def close(self) -> None:
        for member in self._members:
            member.close()


class _Appended:
    """Rows prepared in all members."""

    def __init__(self, changes: Seq[Change]):
        self._changes = changes

    def commit(self) -> None:
        for change in self._changes:
            change.commit()

    def dispose(self) -> None:
        for change in self._changes:
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
    drafts, so each must take tokens that another one proposed ("external"); those that can "adapters" also
    draft for rows that wear them. At most one may look into the target (taps). ConfigError and OpenError
    name the member that does not fit.
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
        self.can |= {"adapters"} & frozenset.union(*(frozenset(member.can) for member in order))
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
        def guarded(member: Drafter) -> GuardedRows:
            make = partial(member.rows, target, max_width)
            return GuardedRows(make, target.vocab_size, member.namespace)

        follow = ["adapters" in member.can for member in self.members]
        return CascadeRows(self.namespace, [guarded(member) for member in self.members], follow)


def _forget(namespace: str, ids: Seq[int]) -> None:
    """What a member does with an answer that does not remember any."""
