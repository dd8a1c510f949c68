"""Sessions: whose last state ends where in a tree. Affinity, never a condition."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container

from stages.tiers.radix import Node

MOST = 256  # sessions whose last states are kept first; the longest silent beyond are like others


class Sessions:
    """Last states by session and namespace, the longest silent first. Owner thread, but for `forget`."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], Node] = OrderedDict()
        self._known: Counter[str] = Counter()  # how many last states each session has
        self._closed: dict[str, None] = {}  # sessions to forget

    def __len__(self) -> int:
        return len(self._last)

    def keep(self, session: str, namespace: str, node: Node | None) -> None:
        """Its last state ends at `node` now; None: nowhere."""
        self.settle()
        self._release((session, namespace))
        if node is not None:
            self._last[session, namespace] = node
            self._known[session] += 1
            node.kept += 1
        while len(self._last) > MOST:
            self._release(next(iter(self._last)))

    def last(self, session: str, namespace: str) -> Node | None:
        self.settle()
        if (node := self._last.get((session, namespace))) is not None:
            self._last.move_to_end((session, namespace))
        return node

    def forget(self, session: str) -> None:
        """It is closed. Any thread: the owner does it when it looks next. Names that are not known are not
        kept, for anybody may send any number of them."""
        if session in self._known:
            self._closed[session] = None

    def settle(self) -> None:
        """Forget who was closed."""
        while self._closed:
            session, _ = self._closed.popitem()
            for key in [key for key in self._last if key[0] == session]:
                self._release(key)

    def leave(self, node: Node) -> None:
        """What ends at `node` is going."""
        if node.kept:
            for key in [key for key, last in self._last.items() if last is node]:
                self._release(key)

    def clear(self) -> None:
        self._last.clear()
        self._known.clear()

    def check(self, nodes: Container[Node]) -> None:
        """AssertionError unless each state is held and counted."""
        for node, count in Counter(self._last.values()).items():
            assert node in nodes and node.kept == count, f"{node.kept} sessions, counted {count}"
        known = Counter(session for session, _ in self._last)
        assert known == self._known, f"{len(known)} sessions are known, counted {len(self._known)}"

    def _release(self, key: tuple[str, str]) -> None:
        if (node := self._last.pop(key, None)) is not None:
            node.kept -= 1
            self._known[key[0]] -= 1
            if not self._known[key[0]]:
                del self._known[key[0]]
