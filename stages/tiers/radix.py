"""A radix (edge-compressed) tree over token ids: one a namespace, each node owning one segment.

Why: lookup in O(prompt) however many states are held, and states with a common prefix share its
arrays. Invariants, recounted by `check_tree`:

* a node's segment is [parent's stop, own stop) and its key holds those token ids;
* full layers are complete in every node; a windowed layer has a suffix [first, stop) of it, possibly
  empty. A payload that reaches into the nodes before is spread over them where they have holes;
* boundary payloads and attachments belong to the node's stop, so a state that brings one ends there.

Keys are packed int32 (4 bytes a token), compared as memory. The tree moves no bytes of its own
accord: `split` copies one node, `Insertion` says what a state would add before anything changes.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from pipeline.types import Attachment, LayerSlice, Segment, State
from stages.rows.state import (
    check_segment,
    compact,
    evaluate,
    exact_layers,
    longest,
    nbytes,
    payload_bytes,
    usable_len,
)
from stages.rows.state import split as split_segment

WORD = 4  # bytes of one token id in a key


def pack(tokens: Seq[int]) -> bytes:
    """Token ids as a key."""
    return array("i", tokens).tobytes()


def unpack(key: bytes) -> tuple[int, ...]:
    """A key's token ids."""
    return tuple(array("i", key))


class Node:
    """A run of tokens. `pins` counts the leases (and the insertion at work) that need it, `kept` the
    sessions whose last state ends here; `used` is when it last was, in monotonic seconds."""

    __slots__ = (
        "attachments", "children", "exact", "kept", "key", "min_reuse", "nbytes", "parent", "pins",
        "segment", "used",
    )  # fmt: skip

    def __init__(
        self, key: bytes, segment: Segment, parent: Node | None, min_reuse: int = 0
    ) -> None:
        self.key, self.segment, self.parent, self.min_reuse = key, segment, parent, min_reuse
        self.children: dict[bytes, Node] = {}
        self.exact: dict[int, Any] = {}  # layer -> payload at the segment's stop
        self.attachments: dict[str, Attachment] = {}  # by the drafter's namespace
        self.pins = self.kept = self.nbytes = 0
        self.used = 0.0
        self.weigh()

    def weigh(self) -> int:
        """Recount the bytes; returns how many were added."""
        before = self.nbytes
        tensors = [attachment.tensors for attachment in self.attachments.values()]
        self.nbytes = nbytes(self.segment) + payload_bytes(self.exact) + payload_bytes(tensors)
        return self.nbytes - before

    def chain(self) -> Iterator[Node]:
        """This node and those before it, the root left out."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


def tree_name(state: State) -> tuple[str, bool]:
    """The tree a state belongs to: converted states do not continue unconverted ones."""
    return state.namespace, state.min_reuse > 0


class Tree:
    """The states of one namespace."""

    def __init__(self, state: State) -> None:
        self.name, self.specs, self.exact = tree_name(state), state.specs, exact_layers(state)
        sliding = {layer for layer, spec in enumerate(state.specs) if spec.window}
        self.windowed = tuple(sorted(sliding - self.exact))
        self.root = Node(b"", Segment(0, 0, ()), None)

    def fits(self, state: State) -> bool:
        """Whether the state's layers are of the kinds held here."""
        return state.specs == self.specs and exact_layers(state) == self.exact

    def walk(self, key: bytes) -> tuple[list[Node], int]:
        """Nodes along `key`, the last one perhaps only in part, and how many tokens agree."""
        return walk(self.root, key)

    def usable(self, path: Seq[Node], limit: int) -> int:
        """Longest usable length along a path. O(path), not O(tokens)."""
        segments = [node.segment for node in path]
        stops = [node.segment.stop for node in path if node.exact]
        while limit > 0:
            limit = usable_len(self.specs, segments, limit, stops, layers=self.windowed)
            late = [n for n in path if n.segment.start < limit < n.min_reuse]
            if not late:
                return limit
            limit = late[0].segment.start
        return 0

    def split(self, node: Node, at: int) -> Node:
        """Cut a node in two (copies its arrays); `node` stays the deeper one. Returns the new one."""
        assert node.parent is not None
        left, right = split_segment(node.segment, at)
        edge = (at - left.start) * WORD
        above = Node(node.key[:edge], left, node.parent, node.min_reuse)
        above.pins, above.used = node.pins, node.used
        node.parent.children[above.key[:WORD]] = above
        node.key, node.segment, node.parent = node.key[edge:], right, above
        above.children[node.key[:WORD]] = node
        node.weigh()
        return above


class Edge(Protocol):
    """What a tree is made of: packed tokens, and by their first WORD those that go on from there."""

    key: bytes

    @property
    def children(self) -> Mapping[bytes, Any]: ...


E = TypeVar("E", bound=Edge)


def walk(root: E, key: bytes) -> tuple[list[E], int]:
    """Edges along `key`, the last one perhaps only in part, and how many tokens agree. O(key)."""
    edge, at, path = root, 0, list[E]()
    while child := edge.children.get(key[at : at + WORD]):
        path.append(child)
        shared = common(child.key, key, at)
        at += shared
        if shared < len(child.key):
            break
        edge = child
    return path, at // WORD


def common(edge: bytes, key: bytes, at: int) -> int:
    """Bytes of `edge` that agree with `key` from offset `at`; a multiple of WORD."""
    if key.startswith(edge, at):
        return len(edge)
    length = min(len(edge), len(key) - at) // WORD
    other = np.frombuffer(key, np.int32, length, at)
    differ = np.flatnonzero(np.frombuffer(edge, np.int32, length) != other)
    return (int(differ[0]) if differ.size else length) * WORD


@dataclass(frozen=True)
class Fill:
    """What one held node gains from a state."""

    node: Node
    segment: Segment
    exact: Mapping[int, Any]
    attachments: Mapping[str, Attachment]

    @property
    def added(self) -> int:
        """Bytes, less those of what it replaces."""
        node, names = self.node, self.attachments.keys() & self.node.attachments.keys()
        new = payload_bytes(self.exact) + sum(
            payload_bytes(a.tensors) for a in self.attachments.values()
        )
        old = sum(payload_bytes(node.attachments[name].tensors) for name in names)
        return nbytes(self.segment) - nbytes(node.segment) + new - old

    def apply(self) -> None:
        self.node.segment = self.segment
        self.node.exact.update(self.exact)
        self.node.attachments.update(self.attachments)
        self.node.weigh()


class Insertion:
    """What a state adds to a tree: new runs after the held tokens, and what held nodes lack.

    In three steps, so that the owner can make room in between: the constructor splits the nodes at
    which the state must begin or end, `added` tells the bytes, `apply` evaluates and attaches.
    """

    def __init__(self, tree: Tree, state: State) -> None:
        self.tree, self.state, self.length = tree, state, len(state.tokens)
        self.key = pack(state.tokens)
        path, self.held = tree.walk(self.key)
        stops = {segment.stop for segment in state.segments}
        self.edges = sorted({self.held, *stops, *state.boundaries})
        self._divide(path)
        self.path, _ = tree.walk(self.key)
        self.fills = [fill for node in self.path if (fill := self._fill(node))]
        self.fresh = self._fresh()
        self.added = sum(fill.added for fill in self.fills) + sum(
            node.nbytes for node in self.fresh
        )

    def apply(self) -> None:
        """Attach everything. Nothing has changed if evaluation fails."""
        evaluate([fill.segment for fill in self.fills] + [node.segment for node in self.fresh])
        for fill in self.fills:
            fill.apply()
        if self.fresh:
            first = self.fresh[0]
            first.parent = self.path[-1] if self.path else self.tree.root
            first.parent.children[first.key[:WORD]] = first
        for node in self.path:
            node.min_reuse = min(node.min_reuse, self.state.min_reuse)

    def _divide(self, path: Seq[Node]) -> None:
        for node in path:
            for at in self.edges:  # rising, because `node` stays the deeper part
                if (
                    node.segment.start < at < node.segment.stop
                    and at <= self.held
                    and self._useful(node, at)
                ):
                    self.tree.split(node, at)

    def _useful(self, node: Node, at: int) -> bool:
        """Whether something of the state can only be kept in a node that ends at `at`."""
        branches = at == self.held < self.length
        ends = at in self.state.boundaries or (at == self.length and bool(self.state.attachments))
        return branches or ends or bool(self._gains(node, at))

    def _gains(self, node: Node, stop: int) -> dict[int, LayerSlice]:
        """Windowed layers in which the state reaches further back from `stop` than the node does."""
        gains: dict[int, LayerSlice] = {}
        for layer in self.tree.windowed:
            have, mine = node.segment.layers[layer], longest(self.state.segments, layer, stop)
            assert have is not None and mine is not None
            if max(mine.first, node.segment.start) < min(have.first, stop):
                gains[layer] = mine
        return gains

    def _fill(self, node: Node) -> Fill | None:
        start, stop = node.segment.start, node.segment.stop
        gains = {i: compact(piece, start, stop) for i, piece in self._gains(node, stop).items()}
        exact = {} if node.exact else self.state.boundaries.get(stop, {})
        attachments = self._attachments(stop)
        if not (gains or exact or attachments):
            return None
        layers = tuple(gains.get(i, piece) for i, piece in enumerate(node.segment.layers))
        return Fill(
            node,
            replace(node.segment, layers=layers) if gains else node.segment,
            exact,
            attachments,
        )

    def _fresh(self) -> list[Node]:
        """A chain of new nodes from the held length to the state's; not attached yet."""
        bounds = [at for at in self.edges if at >= self.held]
        chain: list[Node] = []
        for start, stop in itertools.pairwise(bounds):
            layers = (self._piece(layer, start, stop) for layer in range(len(self.tree.specs)))
            node = Node(
                self.key[start * WORD : stop * WORD], Segment(start, stop, tuple(layers)), None
            )
            node.exact = dict(self.state.boundaries.get(stop, {}))
            node.attachments = self._attachments(stop)
            node.min_reuse = self.state.min_reuse
            node.weigh()
            if chain:
                node.parent, chain[-1].children[node.key[:WORD]] = chain[-1], node
            chain.append(node)
        return chain

    def _piece(self, layer: int, start: int, stop: int) -> LayerSlice | None:
        """The state's own slice where it fits as it is, else a copy of the part."""
        best = longest(self.state.segments, layer, stop)
        for segment in self.state.segments:
            piece = segment.layers[layer]
            if piece and best and segment.stop == stop and piece.first == best.first >= start:
                return piece
        return compact(best, start, stop)

    def _attachments(self, stop: int) -> dict[str, Attachment]:
        mine = self.state.attachments if stop == self.length else ()
        return {attachment.namespace: attachment for attachment in mine}


def check_tree(tree: Tree) -> list[Node]:
    """All nodes, every invariant recounted. AssertionError with the numbers."""
    nodes = [tree.root]
    for node in nodes:
        for first, child in node.children.items():
            _check_node(tree, node, first, child)
            nodes.append(child)
    return nodes[1:]


def _check_node(tree: Tree, parent: Node, first: bytes, node: Node) -> None:
    segment, counted = node.segment, node.nbytes
    assert node.parent is parent and node.key[:WORD] == first, (
        f"node at {segment.start} hangs wrong"
    )
    assert segment.start == parent.segment.stop < segment.stop, (
        f"{segment.start} after {parent.segment.stop}"
    )
    assert len(node.key) == (segment.stop - segment.start) * WORD, f"{len(node.key)} bytes of key"
    check_segment(tree.specs, segment, segment.start)
    early = [p.first for p in segment.layers if p and p.first < segment.start]
    assert not early, f"slices from {early} in a node from {segment.start}"
    assert node.weigh() == 0, f"{node.nbytes} bytes, counted {counted}"
    assert 0 <= node.pins <= (parent.pins if parent.parent else node.pins), f"{node.pins} pins"
