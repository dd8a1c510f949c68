"""A constraint that waits until the model has finished thinking."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from pipeline.types import Matcher, Tokenizer


@dataclass(frozen=True)
class Marks:
    """The two tokens around a reasoning section."""

    begin: int
    end: int

    @classmethod
    def find(cls, tokenizer: Tokenizer, begin: str, end: str) -> Marks | None:
        """None where the tokenizer has no single tokens for them: then nothing is reasoning."""
        ids = [tokenizer.encode(text, add_special=False) if text else [] for text in (begin, end)]
        return cls(ids[0][0], ids[1][0]) if all(len(one) == 1 for one in ids) else None

    def open_in(self, prompt_ids: Seq[int]) -> bool:
        """Whether the prompt ends inside a section."""
        last = next((i for i in reversed(prompt_ids) if i in (self.begin, self.end)), self.end)
        return last == self.begin


class AfterReasoning:
    """Nothing is forbidden inside a section, and nothing in it moves the grammar. Where the prompt has
    not opened one, the answer may: its first token may be the mark that begins one."""

    free = False

    def __init__(self, inner: Matcher, marks: Marks, inside: bool):
        self._inner, self._marks, self._starts_inside = inner, marks, inside
        self._place(inside)

    def _place(self, inside: bool) -> None:
        self._inside, self._fresh = inside, not inside

    @property
    def done(self) -> bool:
        return not self._inside and self._inner.done

    def mask(self, logits_V: Any) -> Any:
        if self._inside:
            return logits_V
        legal_V = self._inner.mask(logits_V)
        if self._fresh:
            legal_V = legal_V.copy()
            legal_V[self._marks.begin] = logits_V[self._marks.begin]
        return legal_V

    def push(self, token_id: int) -> None:
        if self._inside:
            self._inside = token_id != self._marks.end
        elif self._fresh and token_id == self._marks.begin:
            self._inside = True
        else:
            self._inner.push(token_id)
        self._fresh = False

    def restart(self, output_ids: Seq[int]) -> None:
        self._place(self._starts_inside)
        self._inner.restart(())
        for token in output_ids:
            self.push(token)

    def legal(self, token_ids: Seq[int]) -> int:
        opens = self._fresh and token_ids[:1] == [self._marks.begin]
        if not self._inside and not opens:
            return self._inner.legal(token_ids)
        if self._marks.end not in token_ids:
            return len(token_ids)
        after = list(token_ids).index(self._marks.end) + 1
        return after + self._inner.legal(token_ids[after:])

    def forced(self, limit: int) -> list[int]:
        return [] if self._inside or self._fresh else self._inner.forced(limit)
