"""Sessions: whose last state ends where in a tree. Affinity, never a condition."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Container

from stages.tiers.radix import Node

MOST = 256  # sessions whose last states are kept first; the longest silent beyond are like others


class Sessions:
    """Last states by session and namespace, the longest silent first. Owner thread, but for `forget`."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], Node] = OrderedDict()
        self._closed: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._last)

    def keep(self, session: str, namespace: str, node: Node | None) -> None:
        """Its last state ends at `node` now; None: nowhere."""
        self.settle()
        self._release((session, namespace))
        if node is not None:
            self._last[session, namespace] = node
            node.kept += 1
        while len(self._last) > MOST:
            self._release(next(iter(self._last)))

    def last(self, session: str, namespace: str) -> Node | None:
        self.settle()
        if (node := self._last.get((session, namespace))) is not None:
            self._last.move_to_end((session, namespace))
        return node

    def forget(self, session: str) -> None:
        """It is closed. Any thread: the owner does it when it looks next."""
        self._closed.append(session)

    def settle(self) -> None:
        """Forget who was closed."""
        while self._closed:
            session = self._closed.popleft()
            for key in [key for key in self._last if key[0] == session]:
                self._release(key)

    def leave(self, node: Node) -> None:
        """What ends at `node` is going."""
        if node.kept:
            for key in [key for key, last in self._last.items() if last is node]:
                self._release(key)

    def clear(self) -> None:
        self._last.clear()

    def check(self, nodes: Container[Node]) -> None:
        """AssertionError unless each state is held and counted."""
        for node, count in Counter(self._last.values()).items():
            assert node in nodes and node.kept == count, f"{node.kept} sessions, counted {count}"

    def _release(self, key: tuple[str, str]) -> None:
        if (node := self._last.pop(key, None)) is not None:
            node.kept -= 1
