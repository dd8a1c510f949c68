"""What is combined with what. Options come from disk: a new one is in the matrix by being there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product

from pipeline.catalog import Catalog, package_folder
from pipeline.errors import HeadraceError, nearest
from pipeline.lab.capabilities import KINDS

ROWS = (1, 4)
TIERS = ("[disk]", "[ram,disk]")  # with a disk answers that were cut off can go on
CONSTRAINTS = ("none", "llguidance")
FAMILIES: Mapping[str, str] = {  # tiny family -> the kind of layer it stands for
    family if family != "qwen3_next" else "qwen3_5": kind for kind, family in KINDS.items()
}
NEEDS: Mapping[str, tuple[str, ...]] = {  # {family}: the target's
    "ngram": ("drafter.min_ngram=1",),
    "suffix": ("drafter.min_match=1",),
    "cascade": ("drafter.ngram.min_ngram=1", "drafter.suffix.min_match=1"),
    "two_model": (
        "draft_model=tiny", "draft_model.family={family}", "draft_model.bits=4",
        "draft_model.head_size=64",
    ),
}  # fmt: skip


class AxisError(HeadraceError):
    """`--axes` names what there is not."""


@dataclass(frozen=True)
class Cell:
    """One combination; its numbers of rows are tried in one engine."""

    drafter: str
    kv: str
    family: str
    tier: str = TIERS[0]
    constraint: str = "none"
    rows: tuple[int, ...] = ROWS


@dataclass(frozen=True)
class Axes:
    """The options that are combined."""

    drafter: tuple[str, ...]
    kv: tuple[str, ...]
    family: tuple[str, ...]
    rows: tuple[int, ...] = ROWS

    @classmethod
    def read(cls, words: Sequence[str] = ()) -> Axes:
        """`drafter=ngram,suffix` and the like; an axis not named is whole. AxisError lists all faults."""
        known = whole()
        said = {
            name: tuple(value.split(",")) for name, _, value in (w.partition("=") for w in words)
        }
        faults = [
            f"{name}: no such axis. {nearest(name, known)} Axes: {', '.join(known)}."
            for name in said
            if name not in known
        ]
        faults += [
            f"{name}: has no '{word}'. {nearest(word, known[name])} It has: {', '.join(known[name])}."
            for name in said
            if name in known
            for word in said[name]
            if word not in known[name]
        ]
        if faults:
            raise AxisError("--axes: " + "\n- ".join(["", *faults] if len(faults) > 1 else faults))
        chosen = {**known, **said}
        rows = tuple(int(count) for count in chosen.pop("rows"))
        return cls(**chosen, rows=rows)


def whole() -> dict[str, tuple[str, ...]]:
    """Every option of every axis; `none` and `native` first."""
    catalog = Catalog(package_folder("conf"))
    return {
        "drafter": _sorted(catalog.options("drafter"), "none"),
        "kv": _sorted(catalog.options("kv"), "native"),
        "family": tuple(FAMILIES),
        "rows": tuple(map(str, ROWS)),
    }


def _sorted(names: Mapping[str, object], first: str) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (name != first, name)))


@dataclass(frozen=True)
class Heads:
    """Drafters with a checkpoint of their own: family -> drafter -> folder. A kind that is published as a
    part of one family's checkpoints only is not there for the others."""

    folders: Mapping[str, Mapping[str, str]]

    def has(self, drafter: str, family: str) -> bool:
        """Whether there is such a thing: where not, there is no cell."""
        kinds = {name for found in self.folders.values() for name in found}
        return drafter not in kinds or drafter in self.folders[family]

    def needs(self, drafter: str, family: str) -> list[str]:
        found = self.folders[family]
        path = found.get(drafter) or (next(iter(found.values())) if drafter == "auto" else None)
        return [f"drafter.path={path}"] if path else []


def cells(axes: Axes, heads: Heads) -> Iterator[Cell]:
    """Drafter x KV policy x family in full; tier and constraint pairwise with each of them."""
    ways = list(product(TIERS, CONSTRAINTS))
    sides = (enumerate(axes.family), enumerate(axes.kv), enumerate(axes.drafter))
    for (f, family), (k, kv), (d, drafter) in product(*sides):
        if heads.has(drafter, family):
            tier, constraint = ways[(f + k + d) % len(ways)]
            yield Cell(drafter, kv, family, tier, _forced(drafter, constraint), axes.rows)


def pairwise(axes: Axes, heads: Heads) -> Iterator[Cell]:
    """Fewer cells, of one number of rows each, in which every two options of different axes still meet:
    each next one is the cell with most pairs that have not met yet."""
    whole = [replace(cell, rows=(n,)) for cell in cells(axes, heads) for n in cell.rows]
    pairs = {cell: set(combinations(_named(cell), 2)) for cell in whole}
    lacking = set[object]().union(*pairs.values())
    chosen = []
    while lacking:
        best = max(whole, key=lambda cell: len(pairs[cell] & lacking))
        chosen.append(best)
        lacking -= pairs[best]
    return iter(sorted(chosen, key=whole.index))


def _named(cell: Cell) -> list[tuple[str, object]]:
    return [(field.name, getattr(cell, field.name)) for field in fields(cell)]


def _forced(drafter: str, constraint: str) -> str:
    """A drafter of forced tokens needs somebody who forces."""
    return "llguidance" if drafter == "grammar" else constraint


def settings(cell: Cell, heads: Heads, layer_map: str) -> list[str]:
    """What one would type for the cell; `layer_map` is the family's, for kv=per_layer."""
    needs = [need.format(family=cell.family) for need in NEEDS.get(cell.drafter, ())]
    return [
        *target(cell, layer_map), "flow=resumable", f"drafter={cell.drafter}", *needs,
        *heads.needs(cell.drafter, cell.family), "depth.max=3", f"tier={cell.tier}",
        "stage.progress_capture.checkpoint_tokens=3",
        "stage.checkpoint_capture.min_tokens=4",  # the shortest prompt too
    ]  # fmt: skip


def plain(cell: Cell, layer_map: str) -> list[str]:
    """The same model without drafter and tier: what every cell's tokens are compared with."""
    return [*target(cell, layer_map), "flow=plain", "drafter=none", "tier=none"]


def target(cell: Cell, layer_map: str) -> list[str]:
    own = [f"kv.map={layer_map}"] if cell.kv == "per_layer" else []
    return [
        f"model.family={cell.family}", "model.head_size=64", f"kv={cell.kv}", *own,
        f"constraint={cell.constraint}", "limits.max_rows=4", "stage.chunked_prefill.chunk=24",
        "telemetry.recount=true", "debug=none",
    ]  # fmt: skip
