"""A constraint that waits until the model has finished thinking."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from pipeline.types import Matcher, Tokenizer


@dataclass(frozen=True)
class Marks:
    """The tokens around a reasoning section."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def find(cls, tokenizer: Tokenizer) -> Marks | None:
        """None where a section cannot be told from a text that begins like its mark: then nothing is
        reasoning."""
        marks = tokenizer.dialect.reasoning_ids
        if not marks or not all(len(m) == 1 or m[0] in tokenizer.special_ids for m in marks):
            return None
        return cls(*map(tuple, marks))


class AfterReasoning:
    """Nothing is forbidden inside a section, and nothing in it moves the grammar. Where the prompt has
    not opened one, the answer may: its first token may begin the mark, which is then completed."""

    free = False

    def __init__(self, inner: Matcher, marks: Marks, inside: bool):
        self._inner, self._marks, self._starts_inside = inner, marks, inside
        self._place(inside)

    def _place(self, inside: bool) -> None:
        self._inside, self._opening = inside, not inside
        self._seen: tuple[int, ...] = ()  # of the mark that is being completed

    @property
    def done(self) -> bool:
        return not (self._inside or self._seen) and self._inner.done

    def mask(self, logits_V: Any) -> Any:
        if self._inside:
            return logits_V
        if self._opening and self._seen:
            return _only(logits_V, self._marks.begin[len(self._seen)])
        legal_V = self._inner.mask(logits_V)
        if self._opening:
            legal_V = legal_V.copy()
            legal_V[self._marks.begin[0]] = logits_V[self._marks.begin[0]]
        return legal_V

    def push(self, token_id: int) -> None:
        if self._inside:
            self._follow(token_id, self._marks.end, opens=False)
        elif self._opening and token_id == self._marks.begin[len(self._seen)]:
            self._follow(token_id, self._marks.begin, opens=True)
        else:
            self._opening = False
            self._inner.push(token_id)

    def _follow(self, token_id: int, mark: tuple[int, ...], *, opens: bool) -> None:
        """The last tokens that may be a mark's; with all of them the section opens or closes."""
        seen = (*self._seen, token_id)
        while seen and seen != mark[: len(seen)]:
            seen = seen[1:]
        self._seen = seen
        if seen == mark:
            self._inside, self._opening, self._seen = opens, False, ()

    def restart(self, output_ids: Seq[int]) -> None:
        self._place(self._starts_inside)
        self._inner.restart(())
        for token in output_ids:
            self.push(token)

    def legal(self, token_ids: Seq[int]) -> int:
        ids, begin = tuple(token_ids), self._marks.begin
        if self._inside:
            return self._legal_inside(ids, self._seen)
        if not (self._opening and ids[:1] == begin[len(self._seen) :][:1]):
            return 0 if self._seen else self._inner.legal(ids)
        rest = begin[len(self._seen) :]
        same = next((i for i, (a, b) in enumerate(zip(ids, rest, strict=False)) if a != b), None)
        if same is not None:
            return same
        return (
            len(ids) if len(ids) <= len(rest) else len(rest) + self._legal_inside(ids[len(rest) :])
        )

    def _legal_inside(self, ids: tuple[int, ...], seen: tuple[int, ...] = ()) -> int:
        """All up to the mark that ends the section, and what the grammar takes after it."""
        whole, end = (*seen, *ids), self._marks.end
        starts = range(len(whole) - len(end) + 1)
        at = next((i for i in starts if whole[i : i + len(end)] == end), None)
        if at is None:
            return len(ids)
        after = at + len(end) - len(seen)
        return after + self._inner.legal(ids[after:])

    def forced(self, limit: int) -> list[int]:
        return [] if self._inside or self._opening else self._inner.forced(limit)


def _only(logits_V: Any, token_id: int) -> Any:
    legal_V = logits_V.copy()
    legal_V[:] = -float("inf")
    legal_V[token_id] = logits_V[token_id]
    return legal_V
