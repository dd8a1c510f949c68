"""Write saved states to the durable tier while nothing runs, and say truthfully what is there."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.errors import ConfigError, Problem, below, refuse
from pipeline.types import Batch, State, Tier

MOST_DIRTY = 10_000  # states remembered as not yet durable; the oldest beyond are lost
MOST_DIRTY_BYTES = 64 << 20  # of their token ids
RETRY_S = (30.0, 600.0)  # after which what was not written is tried again, from and up to
STEP_S = 0.02  # what a step of a flush may take
POLL_S = 0.004  # how soon to look again at a write in flight

Key = tuple[str, bytes]  # namespace, packed token ids
Stage = Literal[
    "waiting", "handed", "undone"
]  # not asked for yet; in the slow tier's queue; not there


@dataclass
class Figures:
    """Plain numbers of all flushes; `lost` counts states that were forgotten before they were durable."""

    handed: int = 0
    lost: int = 0
    flushes: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Flush:
    """One flush under way, with what the slow tier had counted when it began."""

    began: float
    before: Mapping[str, int | float]
    lost: int


class Spill:
    """Idle work, one bounded step at a time (protocol Keeper of the fast tier).

    A state that the fast tier stores is dirty until the first durable tier has all of it. It is
    handed over `debounce_s` after the last one came, or at once when it is about to be evicted; what
    was given up is tried again, less and less often, while the fast tier has it. With `idle_s`, states
    that nobody has used for so long leave the fast tier once nothing is to be written.
    A flush is the boundary of durability: `durable` is true only if every dirty state was written, and none
    was dropped, failed or had vanished. What vanished stays dirty until something that covers it is there.
    """

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    needs: dict[str, frozenset[str]] = {}
    thread = "owner"

    def __init__(
        self,
        tier: list[Tier],
        *,
        debounce_s: float = 1.0,
        close_s: float = 60.0,
        idle_s: float | None = None,
    ):
        refuse(debounce_s=below(debounce_s, 0), idle_s=below(idle_s, 0), close_s=below(close_s, 0))
        self.debounce_s, self.idle_s, self.close_s = debounce_s, idle_s, close_s
        self.tiers = tier
        slow = ["durable" in one.can for one in tier if one is not None]
        if slow != sorted(slow):
            what = "a disk stands before memory, which would never be filled."
            raise ConfigError([Problem("tier", what, "Type 'tier=[ram,disk]'.")])
        self.fast: Tier | None = None
        self.slow: Tier | None = None
        self.again_s: float | None = None  # when the engine should call again; None: on news
        self._dirty: dict[Key, Stage] = {}
        self._dirty_bytes = 0  # of their keys
        self._due = self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self._flush: Flush | None = None
        self._count = Figures()

    def open(self) -> None:
        self.slow = next((t for t in self.tiers if "durable" in t.can), None)
        first = self.tiers[0] if self.tiers else None
        if self.slow is not None and first is not self.slow and first and "watch" in first.can:
            self.fast = first
            first.watch(self)

    def close(self) -> None:
        """A last flush, while the tiers are still open."""
        if self.slow is None:
            return
        until = time.monotonic() + self.close_s
        while (report := self.flush_step()) is None and time.monotonic() < until:
            pass
        if report is None or not report["durable"]:
            told = report or {"reason": f"not done within {self.close_s} s"}
            logging.getLogger(__name__).warning("not all saved states are on disk: %s", told)
        self._dirty.clear()
        self._dirty_bytes = 0
        self._flush = None

    # --- what the fast tier tells

    def stored(self, namespace: str, key: bytes) -> None:
        self._forget((namespace, key))  # the newest goes last
        self._dirty[namespace, key] = "waiting"
        self._dirty_bytes += len(key)
        self._due = time.monotonic() + self.debounce_s
        while len(self._dirty) > MOST_DIRTY or self._dirty_bytes > MOST_DIRTY_BYTES:
            self._forget(next(iter(self._dirty)))
            self._count.lost += 1

    def leaving(self, namespace: str, key: bytes, make: Callable[[], State]) -> None:
        if self._dirty.get((namespace, key)) in ("waiting", "undone"):
            self._hand(namespace, key, make)

    def _forget(self, key: Key) -> None:
        if self._dirty.pop(key, None) is not None:
            self._dirty_bytes -= len(key[1])

    # --- idle work

    def run(self, batch: Batch) -> None:
        self.again_s = None
        if self.slow is None:
            for tier in self.tiers:
                tier.idle_step()
        elif self.slow.idle_step():
            self.again_s = POLL_S
        else:
            self._settle()
            self._next()

    def _next(self) -> None:
        """Hand over one dirty state, if it is time; else let one go that is not used."""
        now = time.monotonic()
        if (key := self._waiting()) is not None:
            self.again_s = max(0.0, self._due - now)
            if now >= self._due:
                self._take(key)
            return
        if self._dirty and now >= self._retry_at:
            self._dirty = dict.fromkeys(self._dirty, "waiting")
            self._retry_at, self._retry_s = now + self._retry_s, min(2 * self._retry_s, RETRY_S[1])
        waits = [max(0.0, self._retry_at - now)] if self._dirty else []
        if self.idle_s is not None and self.fast is not None:
            due = self.fast.demote(self.idle_s)
            waits += [] if due is None else [due]
        self.again_s = min(waits, default=None)

    def _waiting(self) -> Key | None:
        return next((key for key, stage in self._dirty.items() if stage == "waiting"), None)

    def _take(self, key: Key) -> None:
        """Get a state from the fast tier; one that is gone there may be covered by what is written."""
        namespace, tokens = key[0], array("i", key[1])
        match = self.fast.borrow(tokens, namespace) if self.fast else None
        if match is not None:
            self._hand(namespace, key[1], lambda: match.state)
            match.release()
        if self._dirty[key] == "waiting":
            self._dirty[key] = "undone"

    def _hand(self, namespace: str, key: bytes, make: Callable[[], State]) -> None:
        assert self.slow is not None
        self._dirty[namespace, key] = "undone"
        try:
            self.slow.put(make())
            self._dirty[namespace, key] = "handed"
            self._count.handed += 1
        except Exception:
            logging.getLogger(__name__).warning("a state was not handed over", exc_info=True)

    def _settle(self) -> None:
        """The queue is empty: what was handed over is there, or it was given up."""
        for key in [key for key, stage in self._dirty.items() if stage == "handed"]:
            self._check(key)

    def _check(self, key: Key) -> None:
        assert self.slow is not None
        if self.slow.durable(array("i", key[1]), key[0]):
            self._forget(key)
            self._retry_s = RETRY_S[0]
        elif self._dirty[key] == "handed":
            self._dirty[key] = "undone"
            self._retry_at = time.monotonic() + self._retry_s

    # --- flush

    def flush_step(self) -> Mapping[str, Any] | None:
        """A bounded piece of a flush, on the owner's thread while nothing runs; the report at the end."""
        if self.slow is None:
            return {"durable": False, "reason": "no tier keeps states on disk: 'tier=[ram,disk]'"}
        if self._flush is None:
            self._flush = Flush(time.monotonic(), dict(self.slow.stats()), self._count.lost)
            self._dirty = dict.fromkeys(self._dirty, "waiting")
        until = time.monotonic() + STEP_S
        while time.monotonic() < until:
            if self.slow.idle_step():
                self.slow.wait(STEP_S / 2)
                continue
            self._settle()
            if (key := self._waiting()) is None:
                return self._report()
            self._take(key)
        return None

    def _report(self) -> Mapping[str, Any]:
        assert self._flush is not None and self.slow is not None
        for key in [key for key, stage in self._dirty.items() if stage == "undone"]:
            self._check(key)
        now, before = self.slow.stats(), self._flush.before
        grown = {name: int(now[name] - before[name]) for name in ("dropped", "failed")}
        missing = len(self._dirty) + self._count.lost - self._flush.lost
        report = {
            "durable": not (missing or any(grown.values()) or now["pending"]),
            "pending": int(now["pending"]),
            "bytes": int(now["written_bytes"] - before["written_bytes"]),
            "flushed": int(now["written_files"] - before["written_files"]),
            **grown,
            "missing": missing,
            "elapsed_s": round(time.monotonic() - self._flush.began, 4),
        }
        self._flush = None
        self._count.flushes += 1
        self._count.last = report
        return report

    def stats(self) -> Mapping[str, Any]:
        """Plain numbers, any thread."""
        return {"dirty": len(self._dirty), **vars(self._count)}
