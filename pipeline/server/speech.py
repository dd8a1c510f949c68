"""What a model says, told apart while it arrives: reasoning, answer, tool calls.

However the text is cut on its way, the joined pieces are the same: nothing is given out before it is
certain what it is. Blanks around reasoning and calls belong to neither and are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.types import Dialect

# a call whose arguments can be given out as they come
HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
REST = re.compile(r"\s*\}?\s*")  # of such a call, between its arguments and the mark


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the thinking before it."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of the function `name`; what follows are its arguments. `id` is the model's own, if any."""

    id: str
    name: str


@dataclass(frozen=True)
class CallText:
    """More of the arguments' JSON of the call that has begun last."""

    text: str


@dataclass(frozen=True)
class CallWords:
    """A call in its family's own words, for `Dialect.calls` to read; `marked` is what it is if it is none."""

    text: str
    marked: str


Piece = Content | Reasoning | CallBegins | CallText
Heard = Piece | CallWords
State = Callable[["Speech", bool], Iterator[Heard]]  # unbound: no cycle for the collector


class Speech:
    """One choice's text. Without a dialect all of it is content. `calls`: it may call tools; `inside`: the
    prompt has opened its reasoning."""

    def __init__(self, dialect: Dialect | None, *, inside: bool, calls: bool):
        self._calls = calls
        self._begin_call, self._end_call = dialect.tools if dialect else ("", "")
        reasoning = dialect.reasoning if dialect else None
        self._begin_reasoning, self._end_reasoning = reasoning or ("", "")
        self._held = ""  # arrived, and not yet known what it is
        self._state: State = Speech._think if inside else Speech._open
        self._fresh = True  # nothing of the reasoning has been given out
        self._json = JSONEnd()

    def push(self, text: str) -> list[Heard]:
        self._held += text
        return list(self._pieces(final=False))

    def flush(self) -> list[Heard]:
        """The text has ended: what was held back is what it looks like."""
        return list(self._pieces(final=True))

    def _pieces(self, *, final: bool) -> Iterator[Heard]:
        """Run states until one is left that waits for more."""
        while True:
            state = self._state
            yield from state(self, final)
            if self._state == state:
                return

    # --- states: each takes of `_held` what it can, and says who goes on

    def _open(self, final: bool) -> Iterator[Heard]:
        mark = self._begin_reasoning
        text = self._held.lstrip()
        if mark and text.startswith(mark):
            self._held = text[len(mark) :]
            self._state = Speech._think
        elif not mark or final or not mark.startswith(text):
            self._state = Speech._answer
        yield from ()

    def _think(self, final: bool) -> Iterator[Heard]:
        text, found = self._until(self._end_reasoning, final)
        if self._fresh:
            text = text.lstrip()
        self._fresh = self._fresh and not text
        if text:
            yield Reasoning(text)
        if found:
            self._state = Speech._skip

    def _skip(self, final: bool) -> Iterator[Heard]:
        self._held = self._held.lstrip()
        if self._held:
            self._state = Speech._answer
        yield from ()

    def _answer(self, final: bool) -> Iterator[Heard]:
        if self._calls:
            text, found = self._until(self._begin_call, final, blanks=final)
        else:
            text, found, self._held = self._held, False, ""
        if text:
            yield Content(text)
        if found:
            self._state = Speech._call

    def _call(self, final: bool) -> Iterator[Heard]:
        end = self._end_call
        at = self._held.find(end) if end else -1
        head = HEAD.match(self._held)
        if head and (at < 0 or head.end() <= at):
            yield CallBegins("", _name(head[1]))
            self._held, self._json = self._held[head.end() :], JSONEnd()
            self._state = Speech._arguments
        elif at >= 0 or final:
            body = self._held if at < 0 else self._held[:at]
            self._held = "" if at < 0 else self._held[at + len(end) :]
            yield CallWords(body, self._begin_call + body + (end if at >= 0 else ""))
            self._state = Speech._skip

    def _arguments(self, final: bool) -> Iterator[Heard]:
        end = self._json.find(self._held)
        text = self._held if end is None else self._held[:end]
        self._held = self._held[len(text) :]
        if text:
            yield CallText(text)
        if end is not None:
            self._state = Speech._close

    def _close(self, final: bool) -> Iterator[Heard]:
        """To the mark; what else stands before it is not part of any call."""
        end = self._end_call
        at = self._held.find(end) if end else -1
        if at >= 0:
            self._held = self._held[at + len(end) :]
            self._state = Speech._skip
        elif final:
            self._held = REST.sub("", self._held, count=1)
            self._state = Speech._skip
        yield from ()

    # --- parts of them

    def _until(self, mark: str, final: bool, *, blanks: bool = False) -> tuple[str, bool]:
        """What certainly stands before the mark, and whether the mark is there; both are taken. Blanks
        before it wait too, unless `blanks`."""
        at = self._held.find(mark)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(mark) :]
            return text, True
        keep = 0 if final else _beginning(self._held, mark)
        text = self._held[: len(self._held) - keep]
        text = text if blanks else text.rstrip()
        self._held = "" if final else self._held[len(text) :]
        return text, False


class JSONEnd:
    """Finds where an object that arrives in pieces is complete, or can no longer be one."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The length of the object's rest in `text`; None: it goes on."""
        for at, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == "<":  # no letter of JSON: a mark
                return at
            else:
                self._quoted = letter == '"'
                self._depth += (letter in "{[") - (letter in "}]")
                if self._depth == 0:
                    return at + 1
        return None


def _beginning(text: str, mark: str) -> int:
    """Length of the longest tail of `text` that may become the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _name(quoted: str) -> str:
    """The name inside a JSON string's quotes."""
    try:
        return str(json.loads(f'"{quoted}"', strict=False))
    except ValueError:
        return quoted
