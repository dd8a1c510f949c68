"""A suffix tree that grows by a token at a time and always knows the longest suffix seen before.

Construction: Ukkonen (On-line construction of suffix trees, 1995). Its active point after each token
is the end of the longest suffix that also occurs earlier, and the edges below it are what followed
there: the longest match costs nothing beyond the index, O(1) amortised a token whatever the length.

Edges are one dictionary (node and first token -> child), nodes are entries of four arrays, so that
a token of text costs about 200 bytes (measured on prose) instead of a dictionary a node.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

OPEN = -1  # a leaf's edge ends where the text does
SHIFT = 32  # bits of a token in an edge's key


class Place(NamedTuple):
    """The end of a path from the root: `length` tokens, the last `past` of which lie below `node` and
    read text[at : at + past]."""

    node: int = 0
    at: int = 0
    past: int = 0
    length: int = 0


class SuffixTree:
    """Node 0 is the root. `start`, `stop`: the text range that the edge into a node reads; `link`: the
    node of the same string without its first token; `latest`: the child entered last."""

    def __init__(self) -> None:
        self.text = array("i")
        self.start, self.stop = array("i", [0]), array("i", [0])
        self.link, self.latest = array("i", [0]), array("i", [0])
        self._edges: dict[int, int] = {}
        self.end = Place()  # of the longest suffix that occurs earlier

    def extend(self, tokens: Seq[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        text, edges, link = self.text, self._edges, self.link
        node, at, past, length = self.end
        place = len(text)
        text.append(token)
        fresh = 0  # the node made in the step before, which waits for its link
        length += 1
        while length:
            if not past:
                at = place
            key = node << SHIFT | text[at]
            child = edges.get(key, 0)
            if child:
                size = self._size(child)
                if past >= size:
                    self.latest[node] = child
                    node, at, past = child, at + size, past - size
                    continue
                if text[self.start[child] + past] == token:
                    past += 1
                    link[fresh] = node if fresh else 0
                    break
                made = self._split(node, key, child, past, place)
            else:
                edges[key] = self.latest[node] = self._node(place, OPEN)
                made = 0
            if fresh:
                link[fresh] = made or node
            fresh = made
            length -= 1
            if node:
                node = link[node]
            elif past:
                past, at = past - 1, place - length + 1
        self.end = Place(node, at, past, length)

    def _node(self, start: int, stop: int) -> int:
        self.start.append(start)
        self.stop.append(stop)
        self.link.append(0)
        self.latest.append(0)
        return len(self.start) - 1

    def _split(self, node: int, key: int, child: int, past: int, place: int) -> int:
        """A node `past` tokens down the edge to `child`, with a leaf for text[place:]."""
        start = self.start[child]
        made = self._node(start, start + past)
        self._edges[key] = self.latest[node] = made
        self.start[child] = start + past
        self._edges[made << SHIFT | self.text[start + past]] = child
        leaf = self._node(place, OPEN)
        self._edges[made << SHIFT | self.text[place]] = self.latest[made] = leaf
        return made

    def _size(self, child: int) -> int:
        stop = self.stop[child]
        return (len(self.text) if stop == OPEN else stop) - self.start[child]

    def advance(self, place: Place, token: int, least: int) -> Place:
        """The end of the longest suffix of (the path to `place`, then `token`) that is in the tree, if
        it has at least `least` tokens; else the root. Changes nothing."""
        node, at, past, length = place
        edges, text = self._edges, self.text
        while length + 1 >= least:
            while past:
                child = edges[node << SHIFT | text[at]]
                size = self._size(child)
                if past < size:
                    break
                node, at, past = child, at + size, past - size
            if past:
                start = self.start[child]
                if text[start + past] == token:
                    return Place(node, start, past + 1, length + 1)
            elif child := edges.get(node << SHIFT | token, 0):
                return Place(node, self.start[child], 1, length + 1)
            if node:
                node = self.link[node]
            elif past:
                at, past = at + 1, past - 1
            else:
                break
            length -= 1
        return Place()

    def following(self, place: Place, pending: int, count: int) -> list[int]:
        """`count` tokens that followed the path to `place`: where several did, the latest. Where that
        runs to the end of the text, it goes on with `pending` and then with itself."""
        node = self._edges[place.node << SHIFT | self.text[place.at]]
        at, size = self.start[node] + place.past, len(self.text)
        found: list[int] = []
        while len(found) < count:
            stop = size if self.stop[node] == OPEN else self.stop[node]
            if at < stop:
                found += self.text[at : min(stop, at + count - len(found))]
                at = stop
            elif self.stop[node] == OPEN:
                found.append(pending if at == size else found[at - size - 1])
                at += 1
            else:
                node = self._onward(node)
                at = self.start[node]
        return found

    def _onward(self, node: int) -> int:
        """The child by which a proposal goes on."""
        return self.latest[node]

    @property
    def nbytes(self) -> int:
        """About what it takes: arrays, and 100 bytes an edge with its two numbers."""
        return len(self.text) * 4 + len(self.start) * 16 + len(self._edges) * 100

    def same_as(self, other: SuffixTree) -> bool:
        return vars(self) == vars(other)
