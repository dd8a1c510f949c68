"""Integer stages over a toy state: enough to break every rule of the graph."""

from __future__ import annotations

from pipeline.graph import Graph, Node, Offer

FIELDS = ("request", "seed", "number", "double", "extra")


def node(name, reads="", writes="", thread="owner", **needs):
    wanted = {group: frozenset(words.split()) for group, words in needs.items()}
    return Node(name, frozenset(reads.split()), frozenset(writes.split()), wanted, thread)


GIVE = node("give", "request", "number", thread="prepare")
DOUBLE = node("double", "number", "double")
ADD = node("add", "double number", "number")
SINK = node("sink", "double number", "")
GUESS = node("guess", "number", "extra")


def graph(phases, *nodes, **offers):
    """A graph of toy stages; `kv="native rewind batch"` is an offer: the choice, then what it can."""
    made = {group: words.split() for group, words in offers.items()}
    return Graph(
        {phase: tuple(names.split()) for phase, names in phases.items()},
        {n.name: n for n in nodes},
        {group: Offer(words[0], frozenset(words[1:])) for group, words in made.items()},
        fields=FIELDS,
        given=frozenset({"request"}),
        optional=frozenset({"extra"}),
        round=frozenset(),
    )
