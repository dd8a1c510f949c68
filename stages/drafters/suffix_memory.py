"""What earlier answers said, for drafting later ones: kept apart by namespace, the oldest out first.

The idea is the second tree of suffix decoding (Oliaro et al., SuffixDecoding, 2024): answers of the
past in one suffix tree, and of several continuations the most frequent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from stages.drafters.suffix_tree import OPEN, SHIFT, Place, SuffixTree

BORDER = 2**31 - 1  # what stands after an answer; borders count down from here, so no two are alike
IDS = 2**30  # no vocabulary reaches as far, no border comes down to it
CONTEXT = 64  # of a row's last tokens, how many are looked for
COUNTED = 32  # how many tokens deep continuations are counted
NAMESPACES = 8  # that are remembered; the one used longest ago goes first


class CountedTree(SuffixTree):
    """Answers one after the other. `counts`: how often the string that ends in a node was said, exact
    for nodes that begin less than `COUNTED` tokens deep; `usual`: the child said most often."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.usual = array("i", [0]), array("i", [0])
        self._answers = 0

    def learn(self, ids: Seq[int]) -> None:
        begin = len(self.text)
        self.extend([*ids, BORDER - self._answers])
        self._answers += 1
        for start in range(begin, len(self.text) - 1):
            self._count(start)

    def _count(self, start: int) -> None:
        """One more occurrence of the strings that begin at `start`."""
        node, at = 0, start
        while at - start < COUNTED and (node == 0 or self.stop[node] != OPEN):
            child = self._edges[node << SHIFT | self.text[at]]
            self.counts[child] += 1
            best = self.usual[node]
            if not best or self.counts[child] >= self.counts[best]:
                self.usual[node] = child
            node, at = child, at + self._size(child)

    def _node(self, start: int, stop: int) -> int:
        self.counts.append(0)
        self.usual.append(0)
        return super()._node(start, stop)

    def _split(self, node: int, key: int, child: int, past: int, place: int) -> int:
        made = super()._split(node, key, child, past, place)
        self.counts[made] = self.counts[child]
        self.usual[made] = child
        if self.usual[node] == child:
            self.usual[node] = made
        return made

    def _onward(self, node: int) -> int:
        return self.usual[node] or self.latest[node]

    def following(self, place: Place, pending: int, count: int) -> list[int]:
        """As far as the answer goes."""
        found = super().following(place, pending, count)
        return found[: next((i for i, token in enumerate(found) if token > IDS), count)]

    @property
    def nbytes(self) -> int:
        return super().nbytes + 8 * len(self.counts)


class Memory:
    """One namespace's last answers, `tokens` at most: a young tree, which learns, and an old one. Where
    the young one is half of all, it becomes the old one, whose answers are forgotten."""

    def __init__(self, tokens: int):
        self._half = tokens // 2
        self.trees = [CountedTree()]

    def learn(self, ids: Seq[int]) -> None:
        ids = ids[: self._half - 1]  # and the border
        young = self.trees[0]
        if len(young.text) + len(ids) >= self._half and young.text:
            self.trees = [CountedTree(), young]
        self.trees[0].learn(ids)

    @property
    def nbytes(self) -> int:
        return sum(tree.nbytes for tree in self.trees)


class Memories:
    """By namespace; nobody sees another's."""

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._known: dict[str, Memory] = {}  # the last used is last

    def of(self, namespace: str) -> Memory:
        memory = self._known.pop(namespace, None) or Memory(self._tokens)
        self._known[namespace] = memory
        if len(self._known) > NAMESPACES:
            del self._known[next(iter(self._known))]
        return memory

    def forget(self) -> None:
        self._known = {}


class Recall:
    """A row's place in each tree of a memory."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self._places: dict[SuffixTree, tuple[Place, int, int]] = {}

    def longest(self, text: Seq[int], pending: int, least: int) -> tuple[SuffixTree, Place]:
        """The end of the longest suffix of (text, then `pending`) that was ever said, and where."""
        self._places = {tree: self._place(tree, text) for tree in self.memory.trees}
        found = [
            (tree, tree.advance(place, pending, least))
            for tree, (place, _, _) in self._places.items()
        ]
        return max(found, key=lambda one: one[1].length)

    def _place(self, tree: SuffixTree, text: Seq[int]) -> tuple[Place, int, int]:
        """Where the text ends in the tree, for this length of both."""
        place, taken, size = self._places.get(tree, (Place(), 0, 0))
        if size != len(tree.text) or len(text) - taken > CONTEXT:
            place, taken = Place(), max(0, len(text) - CONTEXT)
        for token in text[taken:]:
            place = tree.advance(place, token, 1)
        return place, len(text), len(tree.text)
