"""Saved states in memory: a radix tree a namespace, LRU by bytes over all of them."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pipeline.errors import below, refuse
from pipeline.types import Keeper, State
from stages.rows.state import check, cut_range
from stages.tiers.radix import WORD, Insertion, Node, Tree, check_tree, pack, tree_name, unpack
from stages.tiers.sessions import Sessions


class Lease:
    """A borrowed state (protocol Match). Its arrays stay alive and counted until `release`; views of
    them are lazy, so materialize on the owner thread."""

    tier = "ram"

    def __init__(self, ram: Ram, state: State, path: Seq[Node]) -> None:
        self.state = state
        self.deepest = path[-1]
        self.held = [(node, node.segment, node.nbytes) for node in path]
        self._ram: Ram | None = ram

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        if self._ram is not None:
            self._ram.give_back(self)
            self._ram = None


@dataclass
class Counters:
    """Plain numbers, so that another thread may read them."""

    entries: int = 0  # nodes
    tokens: int = 0
    bytes: int = 0
    memory_bytes: int = 0  # all of these, and what entries and borrowed arrays cost
    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    sessions: int = 0  # whose last state is here
    session_hits: int = 0
    evictions: int = 0
    demotions: int = 0  # went because nobody had used them for long
    dropped: int = 0
    failures: int = 0  # dropped because the device had no memory for a copy
    leases: int = 0
    borrowed_bytes: int = 0  # of borrowed arrays that the tier no longer holds


class Ram:
    """Keeps states in memory (protocol Tier). `max_gb`: cap in 10^9 bytes, of arrays and of what each
    entry costs beside them (`entry_bytes`, roughly measured), so that tiny states are bounded too.

    `_order` holds all nodes, least recently used first. A path is touched from its end to its root,
    so a parent is always more recent than its children and the oldest node is a leaf or pinned.
    Converted states (`min_reuse` > 0, delayed quantization) have trees of their own: their arrays do
    not continue those of an unconverted state.
    """

    name = "ram"
    can = frozenset({"sessions", "shrink", "watch"})

    def __init__(self, *, max_gb: float = 4.0, entry_bytes: int = 2048) -> None:
        bounded = 0 < max_gb < float("inf")
        refuse(
            max_gb="" if bounded else f"wants a number > 0, got {max_gb}",
            entry_bytes=below(entry_bytes, 0),
        )
        self.most = self.cap = round(max_gb * 1e9)
        self.entry_bytes = entry_bytes
        self._trees: dict[tuple[str, bool], Tree] = {}
        self._order: OrderedDict[Node, Tree] = OrderedDict()
        self._leases: list[Lease] = []
        self._sessions = Sessions()
        self._keeper: Keeper | None = None
        self._count = Counters()

    def open(self) -> None: ...

    def close(self) -> None:
        self._keeper = None
        self.clear()

    def watch(self, keeper: Keeper) -> None:
        """Tell `keeper` of every state that is stored and of every one that goes."""
        self._keeper = keeper

    def usable(self, tokens: Seq[int], namespace: str, limit: int) -> int:
        """How many tokens `lookup` would find."""
        key = pack(tokens[: max(0, limit)])
        return max((self._usable(tree, key)[0] for tree in self._of(namespace)), default=0)

    def lookup(self, tokens: Seq[int], namespace: str, limit: int) -> Lease | None:
        """The longest usable state of at most `limit` of these tokens. O(len(tokens))."""
        key = pack(tokens[: max(0, limit)])
        found = [self._usable(tree, key) for tree in self._of(namespace)]
        length, path = max(found, key=lambda pair: pair[0], default=(0, []))
        if not length:
            self._count.misses += 1
            return None
        return self._use(path, tuple(tokens[:length]), namespace)

    def borrow(self, tokens: Seq[int], namespace: str) -> Lease | None:
        """The state of exactly these tokens, for the keeper: no use of it."""
        found = [self._usable(tree, pack(tokens)) for tree in self._of(namespace)]
        length, path = max(found, key=lambda pair: pair[0], default=(0, []))
        return self._lend(path, tuple(tokens), namespace) if length == len(tokens) > 0 else None

    def keep(self, session: str, tokens: Seq[int], namespace: str) -> None:
        """These tokens are the session's last state: others go before it."""
        found = [tree.walk(pack(tokens)) for tree in self._of(namespace)]
        ends = [p[-1] for p, held in found if p and p[-1].segment.stop == held == len(tokens)]
        self._sessions.keep(session, namespace, ends[0] if ends else None)
        self._account()

    def recall(self, session: str, tokens: Seq[int], namespace: str, limit: int) -> Lease | None:
        """The session's last state, if at most `limit` of these tokens begin with it."""
        node = self._sessions.last(session, namespace)
        if node is None or node.segment.stop > limit:
            return None
        path, length, tree = list(node.chain())[::-1], node.segment.stop, self._order[node]
        same = b"".join(each.key for each in path) == pack(tokens[:length])
        if not same or tree.usable(path, length) != length:
            return None
        self._count.session_hits += 1
        return self._use(path, tuple(tokens[:length]), namespace)

    def forget(self, session: str) -> None:
        """The session is closed: its state is like others from now on. Any thread."""
        self._sessions.forget(session)

    # --- taking

    def covered(self, tokens: Seq[int], namespace: str, min_reuse: int = 0) -> int:
        """Where a capture of these tokens may begin: how many leading tokens are held, and all of
        them only if a state of exactly this length is usable, so that nothing is left to publish."""
        if (tree := self._trees.get((namespace, min_reuse > 0))) is None:
            return 0
        path, held = tree.walk(pack(tokens))
        whole = held == len(tokens) and tree.usable(path, held) == held
        return held if whole else min(held, len(tokens) - 1)

    def put(self, state: State) -> bool:
        """Take ownership of a state. False if it was dropped: it does not fit, or the tokens before
        its first segment are no longer held. While a node is split its arrays exist twice."""
        check(state)
        tree = self._trees.get(tree_name(state)) or Tree(state)
        _, held = tree.walk(pack(state.tokens))
        if not state.tokens or not tree.fits(state) or held < state.segments[0].start:
            return self._drop()
        try:
            stored = self._insert(tree, state)
        except (RuntimeError, MemoryError):
            # the device has no room for a copy; nothing has changed but what was evicted
            self._count.failures += 1
            stored = False
        if tree.root.children:
            self._trees[tree.name] = tree
        if stored and self._keeper is not None:
            self._keeper.stored(state.namespace, pack(state.tokens))
        return stored or self._drop()

    def shrink(self, nbytes: int) -> int:
        """Hold at most `nbytes` from now on, and never more than `max_gb`; what is borrowed stays."""
        self.cap = max(0, min(self.most, nbytes))
        while self._count.bytes > self.cap and (victim := self._victim()):
            self._evict(victim)
        self._account()
        return self.cap

    def demote(self, idle_s: float) -> float | None:
        """Let go of one state that nobody has used for so long. Seconds until the next one is due; None
        while nothing is held."""
        node = next((n for n in self._order if not (n.children or n.pins)), None)
        if node is None:
            return None
        if (left := node.used + idle_s - time.monotonic()) > 0:
            return left
        self._evict(node)
        self._count.demotions += 1
        self._account()
        return 0.0

    def idle_step(self) -> bool:
        return False

    def clear(self) -> None:
        """Forget everything; borrowed states stay valid until they are given back."""
        for node in [*self._order, *(tree.root for tree in self._trees.values())]:
            node.children.clear()  # else parents and children keep each other's arrays
        self._trees.clear()
        self._order.clear()
        self._sessions.clear()
        self._count.entries = self._count.tokens = self._count.bytes = 0
        self._account()

    def stats(self) -> Mapping[str, int | float]:
        return {**vars(self._count), "cap_bytes": self.cap}

    def give_back(self, lease: Lease) -> None:
        """Called by a lease when it is released."""
        self._leases.remove(lease)
        self._pin(lease.deepest, -1)
        self._account()
        if self._count.bytes > self.cap:  # it was shrunk meanwhile
            self.shrink(self.cap)

    def _of(self, namespace: str) -> list[Tree]:
        keys = ((namespace, False), (namespace, True))
        return [self._trees[key] for key in keys if key in self._trees]

    def _usable(self, tree: Tree, key: bytes) -> tuple[int, list[Node]]:
        path, held = tree.walk(key)
        length = tree.usable(path, held)
        return length, [node for node in path if node.segment.start < length]

    def _use(self, path: list[Node], tokens: tuple[int, ...], namespace: str) -> Lease:
        self._count.hits += 1
        self._count.reused_tokens += len(tokens)
        self._touch(path[-1], self._order[path[-1]])
        return self._lend(path, tokens, namespace)

    def _lend(self, path: list[Node], tokens: tuple[int, ...], namespace: str) -> Lease:
        lease = Lease(self, self._state(path, tokens, namespace), path)
        self._leases.append(lease)
        self._pin(path[-1], 1)
        self._account()
        return lease

    def _state(self, path: list[Node], tokens: tuple[int, ...], namespace: str) -> State:
        last, length = path[-1], len(tokens)
        whole = last.segment.stop == length
        segments = [node.segment for node in path]
        if not whole:
            segments[-1] = cut_range(segments[-1:], last.segment.start, length)
        return State(
            tokens=tokens,
            namespace=namespace,
            specs=self._order[last].specs,
            segments=tuple(segments),
            boundaries={length: dict(last.exact)} if last.exact else {},
            attachments=tuple(last.attachments.values()) if whole else (),
            min_reuse=max(node.min_reuse for node in path),
        )

    def _insert(self, tree: Tree, state: State) -> bool:
        """Make room, then attach; the nodes the state stands on are pinned meanwhile."""
        insertion = Insertion(tree, state)
        deepest = insertion.path[-1] if insertion.path else tree.root
        self._touch(deepest, tree)
        self._pin(deepest, 1)
        try:
            own = self.entry_bytes * len(insertion.fresh)
            if not self._make_room(insertion.added + own, deepest):
                return False
            insertion.apply()
        finally:
            self._pin(deepest, -1)
            self._account()
        self._touch(insertion.fresh[-1] if insertion.fresh else deepest, tree)
        self._count.bytes += insertion.added
        self._count.tokens += sum(map(width, insertion.fresh))
        self._account()
        return True

    def _make_room(self, added: int, standing: Node) -> bool:
        """Evict until `added` bytes fit; nothing is evicted if they cannot."""
        free = self.cap - added - self._count.borrowed_bytes
        if self._used() <= free:
            return True
        chains = [lease.deepest.chain() for lease in self._leases] + [standing.chain()]
        pinned = {node for chain in chains for node in chain if node in self._order}
        if sum(node.nbytes for node in pinned) > free:
            return False
        while self._used() > free:
            if (victim := self._victim()) is None:
                return False
            self._evict(victim)
        return True

    def _victim(self) -> Node | None:
        """Who goes next: the least recently used that nothing stands on, sessions' last states last."""
        self._sessions.settle()
        free = (node for node in self._order if not (node.children or node.pins))
        first = next(free, None)
        if first is None or not first.kept:
            return first
        return next((node for node in free if not node.kept), first)

    def _used(self) -> int:
        return self._count.bytes + self.entry_bytes * len(self._order)

    def _evict(self, node: Node) -> None:
        self._tell(node)
        self._sessions.leave(node)
        tree = self._order.pop(node)
        assert node.parent is not None
        del node.parent.children[node.key[:WORD]]
        self._count.bytes -= node.nbytes
        self._count.tokens -= width(node)
        self._count.evictions += 1
        if not tree.root.children:
            self._trees.pop(tree.name, None)

    def _tell(self, node: Node) -> None:
        """Let the keeper take the state that ends here, if it can be used at all."""
        if self._keeper is None:
            return
        path, tree = list(node.chain())[::-1], self._order[node]
        key = b"".join(each.key for each in path)
        if tree.usable(path, node.segment.stop) == node.segment.stop:
            name = tree.name[0]
            self._keeper.leaving(name, key, lambda: self._state(path, unpack(key), name))

    def _touch(self, deepest: Node, tree: Tree) -> None:
        now = time.monotonic()
        for node in deepest.chain():
            node.used = now
            self._order[node] = tree
            self._order.move_to_end(node)

    def _pin(self, deepest: Node, by: int) -> None:
        for node in deepest.chain():
            node.pins += by

    def _drop(self) -> bool:
        self._count.dropped += 1
        return False

    def _account(self) -> None:
        """Bring the counters that depend on several facts up to date."""
        lost = {
            id(segment): size
            for lease in self._leases
            for node, segment, size in lease.held
            if node.segment is not segment or node not in self._order
        }
        self._count.borrowed_bytes = sum(lost.values())
        self._count.entries, self._count.leases = len(self._order), len(self._leases)
        self._count.sessions = len(self._sessions)
        self._count.memory_bytes = self._used() + self._count.borrowed_bytes

    def check_integrity(self) -> None:
        """Recount everything. AssertionError with the numbers."""
        nodes = [node for tree in self._trees.values() for node in check_tree(tree)]
        count, place = self._count, {node: i for i, node in enumerate(self._order)}
        assert place.keys() == set(nodes), f"{len(place)} nodes in order, {len(nodes)} in trees"
        sums = sum(node.nbytes for node in nodes), sum(map(width, nodes)), len(nodes)
        assert sums == (count.bytes, count.tokens, count.entries), (
            f"{sums} in trees, counted {count}"
        )
        assert count.bytes <= self.cap or self._leases, (
            f"{count.bytes} bytes over the cap of {self.cap}"
        )
        late = [n for n in nodes if n.parent in place and place[n.parent] < place[n]]
        assert not late, f"{len(late)} nodes more recent than what they stand on"
        pins = Counter(node for lease in self._leases for node in lease.deepest.chain())
        wrong = [(node.pins, pins[node]) for node in nodes if node.pins != pins[node]]
        assert not wrong, f"pins and leases differ: {wrong}"
        self._sessions.check(place)


def width(node: Node) -> int:
    """Tokens of a node."""
    return len(node.key) // WORD
