"""A constraint that waits until the model has finished thinking, or has thought long enough."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from pipeline.errors import RequestError
from pipeline.types import Matcher, ReasoningBudget, Tokenizer


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
    not opened one, the answer may: its first token may begin the mark, which is then completed (but in
    a free answer). After `budget` tokens inside only the end's mark may come."""

    free = False

    def __init__(self, inner: Matcher, marks: Marks, inside: bool, budget: int | None = None):
        self._inner, self._marks, self._starts_inside = inner, marks, inside
        self._budget = math.inf if budget is None else budget
        self._place(inside)

    def _place(self, inside: bool) -> None:
        self._inside, self._opening = inside, not inside
        self._seen: tuple[int, ...] = ()  # of the mark that is being completed
        self._spent = 0  # tokens inside

    @property
    def done(self) -> bool:
        return not (self._inside or self._seen) and self._inner.done

    def mask(self, logits_V: Any) -> Any:
        if self._inside:
            over = self._spent >= self._budget
            return _only(logits_V, self._marks.end[len(self._seen)]) if over else logits_V
        if self._opening and self._seen and not self._inner.free:
            return _only(logits_V, self._marks.begin[len(self._seen)])
        legal_V = self._inner.mask(logits_V)
        if self._opening and not self._inner.free:
            legal_V = legal_V.copy()
            legal_V[self._marks.begin[0]] = logits_V[self._marks.begin[0]]
        return legal_V

    def push(self, token_id: int) -> None:
        if self._inside:
            self._spent += 1
            self._follow(token_id, self._marks.end, opens=False)
        elif self._opening and token_id == self._marks.begin[len(self._seen)]:
            self._follow(token_id, self._marks.begin, opens=True)
        else:
            self._opening, self._seen = False, ()
            self._inner.push(token_id)

    def _follow(self, token_id: int, mark: tuple[int, ...], *, opens: bool) -> None:
        """With all of a mark's tokens the section opens or closes."""
        self._seen = _beginning((*self._seen, token_id), mark)
        if self._seen == mark:
            self._inside, self._opening, self._seen = opens, False, ()

    def restart(self, output_ids: Seq[int]) -> None:
        self._place(self._starts_inside)
        self._inner.restart(())
        for token in output_ids:
            self.push(token)

    def legal(self, token_ids: Seq[int]) -> int:
        ids, rest = tuple(token_ids), self._marks.begin[len(self._seen) :]
        if self._inside:
            return self._legal_inside(ids, self._seen, self._spent)
        if not (self._opening and ids[:1] == rest[:1]):
            return 0 if self._seen and not self._inner.free else self._inner.legal(ids)
        same = next((i for i, (a, b) in enumerate(zip(ids, rest, strict=False)) if a != b), None)
        if same is not None:
            return len(ids) if self._inner.free else same
        if len(ids) <= len(rest):
            return len(ids)
        return len(rest) + self._legal_inside(ids[len(rest) :])

    def _legal_inside(
        self, ids: tuple[int, ...], seen: tuple[int, ...] = (), spent: int = 0
    ) -> int:
        """All that the budget takes up to the mark that ends the section, and then what the grammar does."""
        end = self._marks.end
        for count, token in enumerate(ids):
            if spent + count >= self._budget and token != end[len(seen)]:
                return count
            seen = _beginning((*seen, token), end)
            if seen == end:
                return count + 1 + self._inner.legal(ids[count + 1 :])
        return len(ids)

    def forced(self, limit: int) -> list[int]:
        if self._inside and self._spent >= self._budget:
            return list(self._marks.end[len(self._seen) :])[:limit]
        return [] if self._inside or self._opening else self._inner.forced(limit)


def after_reasoning(
    inner: Matcher, budget: ReasoningBudget | None, tokenizer: Tokenizer, inside: bool
) -> Matcher:
    """`inner` for what follows the answer's reasoning, and the budget for the reasoning. RequestError
    where the model's reasoning cannot be told from its answer by tokens."""
    if inner.free and budget is None:
        return inner
    marks = Marks.find(tokenizer)
    if marks is not None:
        return AfterReasoning(inner, marks, inside, budget.tokens if budget else None)
    if budget is not None:
        message = f"{budget.field}: the length of this model's reasoning cannot be bounded."
        raise RequestError(message, param=budget.field)
    return inner


def _beginning(tokens: tuple[int, ...], mark: tuple[int, ...]) -> tuple[int, ...]:
    """The longest end of `tokens` that begins the mark."""
    while tokens and tokens != mark[: len(tokens)]:
        tokens = tokens[1:]
    return tokens


def _only(logits_V: Any, token_id: int) -> Any:
    legal_V = logits_V.copy()
    legal_V[:] = -float("inf")
    legal_V[token_id] = logits_V[token_id]
    return legal_V
