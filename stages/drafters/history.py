"""Draft rows that need nothing but the row's own token history."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Generic, Protocol, TypeVar

from pipeline.types import Attachment, Change, Owner


class HistoryRow(Protocol):
    """One row: the tokens the target's row holds, and a way to guess what follows them."""

    def extend(self, tokens: Seq[int]) -> None: ...
    def propose(self, pending: int, depth: int) -> list[int]:
        """0..depth tokens to follow `pending`, which is not in the history yet. Changes nothing."""
        ...

    def check_integrity(self) -> None: ...


Row = TypeVar("Row", bound=HistoryRow)


class HistoryRows(Generic[Row]):
    """`DraftRows` over rows of token history.

    They take every token the target keeps and never a rejected one, so nothing is rolled back and
    `commit` equals `consume`. They are refilled from ids, so they leave no attachment.
    """

    def __init__(self, make: Callable[[], Row]):
        self._make = make
        self._rows: list[Row] = []
        self.size = 0

    def assign(self, owners: Seq[Owner]) -> None: ...

    def consume(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        for row, tokens in zip(self._rows, inputs, strict=True):
            row.extend(tokens)

    def prefill(self, tokens: Seq[Seq[int]], hidden: Any = None) -> None:
        self.consume(tokens)

    def commit(self, inputs: Seq[Seq[int]], hidden: Any = None) -> None:
        self.consume(inputs)

    def draft(self, pending: Seq[int], depths: Seq[int], samplers: Seq[Any]) -> list[list[int]]:
        return [
            row.propose(token, depth) if depth else []
            for row, token, depth in zip(self._rows, pending, depths, strict=True)
        ]

    def prepare_append(self, tokens: Seq[Seq[int]], attachments: Seq[Attachment | None]) -> Change:
        return _Append(self, [self._filled(ids) for ids in tokens])

    def _filled(self, tokens: Seq[int]) -> Row:
        row = self._make()
        row.extend(tokens)
        return row

    def filter(self, keep: Seq[int]) -> None:
        self._become([self._rows[index] for index in keep])

    def join(self, fresh: Seq[Row]) -> None:
        self._become([*self._rows, *fresh])

    def _become(self, rows: list[Row]) -> None:
        self._rows, self.size = rows, len(rows)

    def capture(self, row: int) -> Attachment | None:
        return None

    def check_integrity(self) -> None:
        assert self.size == len(self._rows), (self.size, len(self._rows))
        for row in self._rows:
            row.check_integrity()

    def close(self) -> None:
        self._become([])


class _Append(Generic[Row]):
    """Finished rows waiting to join."""

    def __init__(self, rows: HistoryRows[Row], fresh: list[Row]):
        self._rows, self._fresh = rows, fresh

    def commit(self) -> None:
        self._rows.join(self._fresh)
        self._fresh = []

    def dispose(self) -> None:
        self._fresh = []
