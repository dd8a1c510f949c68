"""The pipeline as a graph: phases of stages, joined by the fields they read and write.

Nobody writes edges: order comes from the flow, edges come from the names. `check` proves that the
pieces fit before anything is opened; `edges` says what flows where, for `pipeline.drawing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, fields
from itertools import combinations
from typing import Any

from pipeline.errors import GraphError, Problem, nearest
from pipeline.types import Sequence

PHASES = ("admit", "prefill", "first", "decode", "finish", "idle")
LOOPS = ("prefill", "decode")  # run again and again: their last writes reach their first reads
THREADS = {
    "admit": ("prepare",),
    "prefill": ("owner",),
    "first": ("owner",),
    "decode": ("owner",),
    "finish": ("owner", "io"),
    "idle": ("owner", "io"),
}
FIELDS = tuple(f.name for f in fields(Sequence))
# Set by the engine, or meaningful while still empty: the tokens so far, a request not yet finished.
GIVEN = frozenset({"request", "deliver", "cancelled", "error", "ready", "submitted", "timings"})
GIVEN |= {"entered", "counts", "drafted_by_position", "accepted_by_position"}
GIVEN |= {"processed_ids", "output_ids", "captured_len", "cached_len", "finish_reason"}
# Empty in a flow that has no stage for them, but never read before that stage where there is one.
OPTIONAL = frozenset({"proposal", "depth", "match", "restore"})
# Made anew in each round: in a loop, what an earlier phase or the round before left is no value.
ROUND = frozenset({"proposal", "depth", "scores", "emitted", "accepted", "kept"})
OPENS, SETTLES = "scores", "kept"  # who scores has opened the rows; who reads `kept` closes them

Suggest = Callable[[str, Collection[str]], Seq[str]]


@dataclass(frozen=True)
class Node:
    """A stage's declarations, and the groups whose parts it was given."""

    name: str
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    needs: Mapping[str, Collection[str]] = field(default_factory=dict)
    thread: str = "owner"
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, stage: Any, parts: Seq[str] = ()) -> Node:
        """Declarations are read from the instance: what it was given may have widened them."""
        reads, writes = frozenset(stage.reads), frozenset(stage.writes)
        return cls(name, reads, writes, dict(stage.needs), stage.thread, tuple(parts))


@dataclass(frozen=True)
class Offer:
    """What the part chosen for a group can do, and what it needs of others."""

    choice: str
    can: frozenset[str] = frozenset()
    needs: Mapping[str, Collection[str]] = field(default_factory=dict)
    several: bool = False  # the group takes a list

    def better(self, group: str, option: str) -> str:
        """What to type for a group that can what `option` can: of a list, what is chosen stays."""
        if not self.several:
            return f"{group}={option}"
        names = self.choice.partition("(")[0].split(",")  # behind it: what a part says of itself
        kept = [name for name in names if name != "none"]
        return f"'{group}=[{','.join([*kept, option])}]'"


@dataclass(frozen=True)
class Edge:
    """Fields that flow from one place (phase, stage) to another."""

    source: tuple[str, str]
    target: tuple[str, str]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Immutable. `phases` is the flow as written, in any order; `nodes` the stages that exist."""

    phases: Mapping[str, tuple[str, ...]]
    nodes: Mapping[str, Node]
    offers: Mapping[str, Offer] = field(default_factory=dict)
    fields: tuple[str, ...] = FIELDS
    given: frozenset[str] = GIVEN
    optional: frozenset[str] = OPTIONAL
    round: frozenset[str] = ROUND

    def steps(self) -> list[tuple[str, Node]]:
        """(phase, stage) in the order of a request's life, unknown stages left out."""
        return [
            (p, self.nodes[n]) for p in PHASES for n in self.phases.get(p, ()) if n in self.nodes
        ]

    def check(self, suggest: Suggest = lambda group, abilities: ()) -> None:
        """GraphError with all problems in reading order. `suggest` names options of a group that
        have the abilities, for the hints."""
        rules = (
            self._names, self._repeats, self._fields, self._threads, self._reads, self._writers,
            lambda: self._needs(suggest), self._idle_drafter, self._no_model,
            self._no_end, self._unsettled,
        )  # fmt: skip
        if problems := [problem for rule in rules for problem in rule()]:
            raise GraphError(problems)

    def _names(self) -> Iterator[Problem]:
        for phase, names in self.phases.items():
            if phase not in PHASES:
                yield Problem(f"flow.{phase}", "no such phase.", nearest(phase, PHASES))
            for name in names:
                if name not in self.nodes:
                    yield Problem(
                        f"flow.{phase}", f"no stage named '{name}'.", nearest(name, self.nodes)
                    )

    def _repeats(self) -> Iterator[Problem]:
        for phase, names in self.phases.items():
            for name in sorted({name for name in names if names.count(name) > 1}):
                yield Problem(f"flow.{phase}", f"stage '{name}' is there twice.", "Leave one out.")

    def _fields(self) -> Iterator[Problem]:
        for node in dict(self.steps_by_name()).values():
            for verb, names in (("reads", node.reads), ("writes", node.writes)):
                for name in sorted(names - set(self.fields)):
                    what = f"{verb} '{name}', which is no field of a sequence."
                    yield Problem(f"stage '{node.name}'", what, nearest(name, self.fields))

    def steps_by_name(self) -> list[tuple[str, Node]]:
        """(name, stage) of all stages in use; a stage in two phases is there twice."""
        return [(node.name, node) for _, node in self.steps()]

    def _threads(self) -> Iterator[Problem]:
        for phase, node in self.steps():
            if node.thread not in THREADS[phase]:
                allowed = " or ".join(THREADS[phase])
                what = f"runs on the '{node.thread}' thread, but {phase} runs on {allowed}."
                yield Problem(f"stage '{node.name}' ({phase})", what, "Move it to another phase.")

    def _reads(self) -> Iterator[Problem]:
        for index, (phase, node) in enumerate(self.steps()):
            lacking = node.reads & set(self.fields) - self.given - self._before(index)
            later = self.steps()[index + 1 :]
            for name in sorted(lacking):
                writers = [other.name for p, other in later if p == phase and name in other.writes]
                if writers:
                    yield _misordered(node, phase, name, writers[0])
                elif name not in self.optional:
                    yield self._unwritten(node, phase, name)

    def _before(self, index: int) -> set[str]:
        """Fields that have a value when the step runs: its own too, unless they are a round's."""
        phase, node = self.steps()[index]
        earlier = self.steps()[:index]
        return {
            name
            for p, other in [*earlier, (phase, node)]
            for name in other.writes
            if not self._anew(phase, name) or (p == phase and other is not node)
        }

    def _anew(self, phase: str, name: str) -> bool:
        return phase == "decode" and name in self.round

    def _unwritten(self, node: Node, phase: str, name: str) -> Problem:
        what = f"reads '{name}', but nothing before it gives it a first value."
        hint = f"Put a stage that writes '{name}' before it."
        if self._anew(phase, name):
            what = f"reads '{name}', which each round makes anew, but nothing in {phase} writes it."
            hint = f"Put a stage that writes '{name}' before it in flow.{phase}."
        return Problem(f"stage '{node.name}' ({phase})", what, hint)

    def _writers(self) -> Iterator[Problem]:
        for phase in PHASES:
            nodes = dict.fromkeys(node.name for p, node in self.steps() if p == phase)
            for first, second in combinations([self.nodes[name] for name in nodes], 2):
                blind = (first.writes - first.reads) & (second.writes - second.reads)
                for name in sorted(blind):
                    what = f"'{first.name}' and '{second.name}' both write '{name}' without reading it."
                    yield Problem(
                        f"flow.{phase}", what, "The first value would be lost: leave one out."
                    )

    def _needs(self, suggest: Suggest) -> Iterator[Problem]:
        stages = dict(self.steps_by_name()).values()
        wants = [(f"stage '{node.name}'", node.needs) for node in stages]
        wants += [(f"{group}={offer.choice}", offer.needs) for group, offer in self.offers.items()]
        for who, needs in wants:
            for group, abilities in needs.items():
                yield from self._need(who, group, frozenset(abilities), suggest)

    def _need(
        self, who: str, group: str, abilities: frozenset[str], suggest: Suggest
    ) -> Iterator[Problem]:
        offer = self.offers.get(group)
        if offer is None:
            yield Problem(who, f"needs a {group}, and there is none.", nearest(group, self.offers))
        elif missing := abilities - offer.can:
            can = f"can only {_words(offer.can)}" if offer.can else "can do nothing of the kind"
            what = f"needs {group} to {_words(missing)}, but {group}={offer.choice} {can}."
            names = [name for name in suggest(group, abilities) if name != offer.choice]
            better = [offer.better(group, name) for name in names]
            hint = (
                f"Choose {' or '.join(better)}."
                if better
                else "No option can: choose another flow."
            )
            yield Problem(who, what, hint)

    def _idle_drafter(self) -> Iterator[Problem]:
        drafter = self.offers.get("drafter")
        proposes = any("proposal" in node.writes for node in self._in("decode"))
        warms = not self.phases.get("decode") and any(  # its own state is kept for later, too
            "captured_len" in node.writes for node in self._in("prefill")
        )
        if drafter and drafter.choice != "none" and not (proposes or warms):
            what = f"no stage drafts, so drafter={drafter.choice} would do nothing."
            yield Problem("flow", what, "Choose flow=speculative or drafter=none.")

    def _in(self, phase: str) -> list[Node]:
        return [node for p, node in self.steps() if p == phase]

    def _no_model(self) -> Iterator[Problem]:
        model = self.offers.get("model")
        if model and model.choice == "none":
            yield Problem("model", "somebody has to answer.", "Choose one: headrace list model")

    def _no_end(self) -> Iterator[Problem]:
        """A flow without the phase ends its requests with the prompt."""
        ends = any("finish_reason" in node.writes for node in self._in("decode"))
        if "finish_reason" in self.fields and "decode" in self.phases and not ends:
            what = "no stage writes 'finish_reason', so no request would ever end."
            yield Problem("flow.decode", what, "Put detokenize after accept in flow.decode.")

    def _unsettled(self) -> Iterator[Problem]:
        """A round that is opened and never closed keeps the rows for good."""
        for phase in LOOPS:
            nodes = self._in(phase)
            if not any(OPENS in node.writes for node in nodes):
                continue
            for index, node in enumerate(nodes):
                if SETTLES in node.writes and not any(
                    SETTLES in later.reads for later in nodes[index + 1 :]
                ):
                    what = f"writes '{SETTLES}', but nothing after it makes that the rows' state."
                    hint = f"Put commit after '{node.name}' in flow.{phase}."
                    yield Problem(f"stage '{node.name}' ({phase})", what, hint)

    def edges(self) -> tuple[Edge, ...]:
        """Who hands which fields to whom; a loop's last writer reaches back to its first readers."""
        found: dict[tuple[tuple[str, str], tuple[str, str]], list[str]] = {}
        for index, (phase, node) in enumerate(self.steps()):
            for name in sorted(node.reads):
                for source in self._sources(index, phase, name):
                    found.setdefault((source, (phase, node.name)), []).append(name)
        return tuple(
            Edge(source, target, tuple(names)) for (source, target), names in found.items()
        )

    def _sources(self, index: int, phase: str, name: str) -> list[tuple[str, str]]:
        steps = [(p, node.name, name in node.writes) for p, node in self.steps()]
        earlier = [(p, n) for p, n, writes in steps[:index] if writes][-1:]
        if phase not in LOOPS or (earlier and earlier[0][0] == phase):
            return earlier
        return (
            earlier + [(p, n) for p, n, writes in steps[index + 1 :] if writes and p == phase][-1:]
        )


def _misordered(node: Node, phase: str, name: str, later: str) -> Problem:
    what = f"reads '{name}', but it is first written by '{later}', which runs after it."
    hint = f"Put '{later}' before '{node.name}' in flow.{phase}."
    return Problem(f"stage '{node.name}' ({phase})", what, hint)


def _words(abilities: Collection[str]) -> str:
    return " and ".join(sorted(abilities))
