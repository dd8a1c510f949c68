"""Which tokens are kept in which file: a radix tree a namespace, and who was used last. No I/O.

A run of tokens is a node of the tree; its file may hold more than the run, because a prompt that
leaves another one in the middle of a file divides the run, not the file. What has a meaning at one length
alone (a boundary, attachments) hangs at the end of the run of that length. A lookup costs O(prompt)
however many files there are. Memory: 4 bytes a token, and some hundred a run.

A file says by name which one it stands on. Servers that cut runs at other places write the same
tokens twice; the second is a `spare`: nothing is read from it, but what names it has its place by it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from stages.tiers.radix import WORD, common, walk
from stages.tiers.saved.index import Row

RECORD = "resume/"  # labels of the records of answers under way: resume/<key>/<attempt>


class File:
    """One file: `runs` it holds the tokens of, or hangs at. `payload` until it is written."""

    __slots__ = (
        "hits", "kind", "label", "name", "parent", "payload", "runs", "size", "start", "state", "stop",
        "wanted", "within",
    )  # fmt: skip

    def __init__(self, name: str, row: Row, size: int, payload: Any = None):
        self.name, self.kind, self.label, self.size = name, row.kind, row.label, size
        self.start, self.stop, self.parent, self.payload = row.start, row.stop, row.parent, payload
        self.state = "stored" if payload is None else "pending"  # or "writing"
        self.runs: list[Run] = []
        self.within: Run | None = None  # the run that holds the token before `stop`
        self.hits = 0  # restores that ended in it
        self.wanted = True  # False: only for an answer under way, and goes with it


class Run:
    """Tokens [start, stop) after those of `parent`."""

    __slots__ = ("children", "extras", "file", "key", "min_reuse", "parent", "start", "stop")

    def __init__(self, key: bytes, start: int, parent: Run | None, file: File | None, least: int):
        self.key, self.start, self.parent, self.file, self.min_reuse = (
            key,
            start,
            parent,
            file,
            least,
        )
        self.stop = start + len(key) // WORD
        self.children: dict[bytes, Run] = {}
        self.extras: dict[str, File] = {}  # "boundary:" and "attachment:<namespace>"

    def chain(self) -> Iterator[Run]:
        """This run and those before it, the root left out."""
        run: Run | None = self
        while run is not None and run.parent is not None:
            yield run
            run = run.parent

    def whole_key(self) -> bytes:
        """All token ids up to `stop`."""
        return b"".join(run.key for run in reversed(list(self.chain())))

    def below(self) -> Iterator[Run]:
        """This run and all that stand on it."""
        found = [self]
        for run in found:
            found.extend(run.children.values())
        return iter(found)


class Branches:
    """The runs of one namespace; converted states (delayed quantization) have branches of their own."""

    def __init__(self, specs: str, cuttable: bool):
        self.specs, self.cuttable = specs, cuttable
        self.root = Run(b"", 0, None, None, 0)

    def walk(self, key: bytes) -> tuple[list[Run], int]:
        """Runs along `key`, the last one perhaps only in part, and how many tokens agree."""
        return walk(self.root, key)

    def usable(self, path: Seq[Run], limit: int) -> int:
        """Longest length <= limit at which one can go on. O(path)."""
        while limit > 0:
            if not self.cuttable:
                stops = (r.stop for r in path if r.stop <= limit and "boundary:" in r.extras)
                limit = max(stops, default=0)
            late = [run for run in path if run.start < limit < run.min_reuse]
            if not late:
                return limit
            limit = late[0].start
        return 0

    def ending_at(self, run: Run, at: int) -> Run | None:
        """The run up from `run` that ends at `at`; one that only covers it is divided."""
        for covering in run.chain():
            if covering.start < at <= covering.stop:
                return covering if at == covering.stop else _divide(covering, at)
        return None


def _divide(run: Run, at: int) -> Run:
    """Cut a run in two; `run` stays the deeper one. Returns the new one."""
    assert run.parent is not None and run.file is not None
    edge = (at - run.start) * WORD
    above = Run(run.key[:edge], run.start, run.parent, run.file, run.min_reuse)
    run.parent.children[above.key[:WORD]] = above
    run.key, run.start, run.parent = run.key[edge:], at, above
    above.children[run.key[:WORD]] = run
    run.file.runs.append(above)
    return above


class Shelf:
    """All files, least recently used first. A path is touched from its end to its root, so that what
    stands on something is never more recent than it."""

    def __init__(self) -> None:
        self.trees: dict[tuple[str, bool], Branches] = {}
        self.files: OrderedDict[str, File] = OrderedDict()
        self.records: dict[str, dict[str, File]] = {}  # of answers under way, by key
        self.named: Counter[str] = Counter()  # how many files name this one as what they stand on
        self.tokens = 0

    def of(self, namespace: str) -> list[Branches]:
        keys = ((namespace, False), (namespace, True))
        return [self.trees[key] for key in keys if key in self.trees]

    def tree(self, row: Row) -> Branches | None:
        """Where a row belongs; None if other layers have this namespace."""
        name = (row.namespace, row.min_reuse > 0)
        tree = self.trees.setdefault(name, Branches(row.specs, row.cuttable))
        return tree if (tree.specs, tree.cuttable) == (row.specs, row.cuttable) else None

    def place(self, name: str, row: Row, size: int, payload: Any = None) -> File | None:
        """Take a file in. None if it is here, adds nothing, or what it stands on is not here."""
        tree = self.tree(row)
        if tree is None or name in self.files:
            return None
        before: Run | None = tree.root
        if row.start > 0:
            parent = self.files.get(row.parent)
            within = parent.within if parent else None
            before = tree.ending_at(within, row.start) if within else None
        if before is None or (row.kind != "run" and before is tree.root):
            return None
        file = File(name, row, size, payload)
        placed = self._run(tree, before, row, file) if row.kind == "run" else _hang(before, file)
        if not placed:
            return None
        self.files[name] = file
        self.named[file.parent] += bool(file.parent)
        if key := key_of(file.label):
            self.records.setdefault(key, {})[name] = file
        return file

    def _run(self, tree: Branches, before: Run, row: Row, file: File) -> bool:
        """Attach the tokens of a run after `before`; what others hold of them already stays theirs."""
        at, run = 0, before
        while child := run.children.get(row.key[at : at + WORD]):
            shared = common(child.key, row.key, at)
            at += shared
            run = child
            if shared < len(child.key):
                break
        if at == len(row.key):
            return bool(at) and _spare(run, file)
        if at:
            found = tree.ending_at(run, row.start + at // WORD)
            assert found is not None
            run = found
        fresh = Run(row.key[at:], row.start + at // WORD, run, file, row.min_reuse)
        run.children[fresh.key[:WORD]] = file.within = fresh
        file.runs.append(fresh)
        self.tokens += fresh.stop - fresh.start
        return True

    def touch(self, run: Run) -> None:
        for each in run.chain():
            for extra in each.extras.values():
                self.files.move_to_end(extra.name)
            assert each.file is not None
            self.files.move_to_end(each.file.name)

    def free_to_go(self, file: File) -> bool:
        """Whether nothing stands on it or names it, and nobody is writing it."""
        if file.state == "writing" or self.named[file.name]:
            return False
        if file.kind != "run":
            return True
        standing = (child.file for run in file.runs for child in run.children.values())
        return not any(run.extras for run in file.runs) and all(other is file for other in standing)

    def forget(self, file: File) -> list[File]:
        """Drop a file and all that stands on it; those that are gone, deepest last."""
        if self.files.get(file.name) is not file:
            return []
        gone = {file.name: file}
        if file.kind == "run":
            for run in [below for top in file.runs for below in top.below()]:
                gone |= {extra.name: extra for extra in run.extras.values()}
                if run.file is not None:
                    gone[run.file.name] = run.file
        for each in gone.values():
            self._detach(each)
        return list(gone.values())

    def _detach(self, file: File) -> None:
        del self.files[file.name]
        if key := key_of(file.label):
            del self.records[key][file.name]
            if not self.records[key]:
                del self.records[key]
        self.named[file.parent] -= 1
        if self.named[file.parent] <= 0:
            del self.named[file.parent]
        for run in file.runs:
            if file.kind != "run":
                run.extras.pop(slot(file), None)
                continue
            self.tokens -= run.stop - run.start
            if run.parent is not None and run.parent.children.get(run.key[:WORD]) is run:
                del run.parent.children[run.key[:WORD]]

    def clear(self) -> None:
        self.trees.clear()
        self.files.clear()
        self.named.clear()
        self.records.clear()
        self.tokens = 0

    def check(self) -> None:
        """Recount everything. AssertionError with the numbers."""
        runs = [run for tree in self.trees.values() for run in tree.root.below() if run.parent]
        tokens = sum(run.stop - run.start for run in runs)
        assert tokens == self.tokens, f"{tokens} tokens in trees, counted {self.tokens}"
        held = {run.file.name for run in runs if run.file}
        held |= {extra.name for run in runs for extra in run.extras.values()}
        assert held == set(self.files), f"{len(held)} files in trees, {len(self.files)} counted"
        named = Counter(file.parent for file in self.files.values() if file.parent)
        assert named == self.named, f"{len(named)} files are named, {len(self.named)} counted"
        for run in runs:
            assert run.parent is not None and run.file is not None
            assert run.start == run.parent.stop and run in run.file.runs, f"run at {run.start}"
            assert run.file.start <= run.start < run.stop <= run.file.stop, f"run at {run.start}"
            assert len(run.key) == (run.stop - run.start) * WORD, f"{len(run.key)} bytes of key"


def key_of(label: str) -> str:
    """Whose record an attachment of this label is; "" for a drafter's."""
    return label[len(RECORD) :].rpartition("/")[0] if label.startswith(RECORD) else ""


def slot(file: File) -> str:
    """Where a file hangs at its run."""
    return f"{file.kind}:{file.label}"


def _spare(run: Run, file: File) -> bool:
    """The tokens are held already: a file that is written stays for those that name it."""
    if file.payload is not None:
        return False
    file.kind, file.label, file.within = "spare", file.name, run
    return _hang(run, file)


def _hang(run: Run, file: File) -> bool:
    if slot(file) in run.extras:
        return False
    run.extras[slot(file)] = file
    file.runs.append(run)
    return True
