"""docs/matrix.md: one table a kind of layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipeline.lab.matrix.cells import FAMILIES
from pipeline.lab.matrix.worker import Outcome
from pipeline.lab.table import counted, markdown

PREFACE = """\
# What works with what

Every drafter with every KV policy on every kind of layer, run on tiny random models by

    {command}

{place}

A cell is **yes** where, for one row and for four rows in one batch, greedy and drawn, free and with a form, all
tokens are those of plain decoding alone without a drafter: cold, warm from memory and from disk, and gone on with
after the client hung up in mid-answer (`flow=resumable`), with the rows recounted after every round. Each time every
one of the requests was reused or gone on with, and the four rows were in one round together; every drafter but
`none` drafted. Tiers (`disk`, `ram,disk`) and constraints (`none`, `llguidance`) take turns, so that each meets
every drafter, policy and kind of layer. **–**: such a drafter is published for other models only. **no (n)**:
refused when it is checked or opened, for the reason below.
"""


def page(outcomes: Sequence[Outcome], command: str, place: str) -> str:
    """The whole page."""
    notes: dict[str, int] = {}
    tables = [
        "\n".join([f"## {FAMILIES[family]} (`{family}`)", "", *markdown(rows)])
        for family, rows in _tables(outcomes, notes)
    ]
    reasons = [f"{number}. {text}." for text, number in notes.items()]
    head = PREFACE.format(command=command, place=place)
    return (
        "\n\n".join([head.strip(), summary(outcomes), *tables, "\n".join(reasons)]).strip() + "\n"
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many of each, and how many tokens were compared and drafted."""
    counts = Counter(one.outcome for one in outcomes)
    parts = [f"{counts[name]} {what}" for name, what in SAID.items()]
    share = counts["refused"] / max(len(outcomes), 1)
    tokens = sum(one.tokens for one in outcomes)
    tried = [one for one in outcomes if one.outcome != "refused"]
    drafted = [one.drafted for one in tried if one.cell.drafter != "none"]
    told = (
        f"{tokens:,} tokens were compared. Of {counted(len(drafted), 'cell')} tried with a drafter "
        f"{sum(map(bool, drafted))} drafted, {sum(drafted):,} tokens in all"
    )
    return f"{counted(len(outcomes), 'cell')}: {', '.join(parts)} ({share:.1%}). {told}."


SAID = {"works": "work", "fails": "fail", "refused": "are refused"}


def _tables(
    outcomes: Sequence[Outcome], notes: dict[str, int]
) -> Iterator[tuple[str, list[list[str]]]]:
    """Family, and its rows: a drafter each, a column a policy."""
    families = dict.fromkeys(one.cell.family for one in outcomes)
    policies = list(dict.fromkeys(one.cell.kv for one in outcomes))
    drafters = list(dict.fromkeys(one.cell.drafter for one in outcomes))
    found: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in outcomes:
        found.setdefault((one.cell.family, one.cell.drafter, one.cell.kv), []).append(one)
    for family in families:
        lines = [
            [name, *(_said(found.get((family, name, kv), []), notes) for kv in policies)]
            for name in drafters
        ]
        yield family, [["drafter", *policies], *lines]


def _said(cell: Sequence[Outcome], notes: dict[str, int]) -> str:
    if not cell:
        return "–"
    worst = next((one for one in cell if one.outcome != "works"), None)
    if worst is None:
        return "yes"
    word = "no" if worst.outcome == "refused" else "FAILS"
    return f"{word} ({notes.setdefault(worst.note.rstrip('.'), len(notes) + 1)})"


def refusals(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """Reason -> how many cells."""
    return Counter(one.note for one in outcomes if one.outcome == "refused")
