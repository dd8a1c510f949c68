"""The committed table is what the command says now, and its checks do find what is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.lab import capabilities
from stages.kv.native import Native
from stages.models.loading.families import FAMILIES
from stages.rows import rows

PAGE = Path(__file__).parents[1] / "docs" / "capabilities.md"
TRIED = ["full attention", "sliding window"]  # all kinds take a minute


def lines(kind):
    cells = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row[1:-1]] for row in cells if row[1].strip() == kind]


def unmarked(cell):
    """Without the note's number, which depends on the rest of the page."""
    return cell.partition(" (")[0]


@pytest.mark.parametrize("kind", TRIED)
def test_the_page_says_what_the_command_finds(kind):
    named = [cells[1] for cells in lines(kind)]
    found = list(capabilities.measure(named, {kind: capabilities.KINDS[kind]}))
    page = capabilities.page(found)
    again = "\n".join(line for line in page.splitlines() if line.startswith(f"| {kind} "))
    fresh = [[cell.strip() for cell in row.split("|")[1:-1]] for row in again.splitlines()]
    told = [[unmarked(cell) for cell in row] for row in lines(kind)]
    renew = "run: headrace capabilities > docs/capabilities.md"
    assert told == [[unmarked(cell) for cell in row] for row in fresh], renew
    for row in found:
        if row.policy in ("native", "kv8", "kv4", "paged"):
            assert set(row.cells.values()) == {"yes"}, row


def test_every_kind_has_its_lines():
    assert all(lines(kind) for kind in capabilities.KINDS)
    assert set(capabilities.KINDS.values()) <= set(FAMILIES)


def test_every_hole_has_its_reason():
    holes = [cell for kind in capabilities.KINDS for row in lines(kind) for cell in row[2:]]
    assert all(cell.endswith(")") for cell in holes if cell.split()[0] in ("no", "0"))
    notes = PAGE.read_text().partition("|\n\n")[2].splitlines()
    used = {int(cell.split("(")[1].rstrip(")")) for cell in holes if "(" in cell}
    assert used == set(range(1, 1 + len(notes)))


def test_rows_that_keep_one_token_too_many_are_found_out(monkeypatch):
    own = rows.LayeredRound.resolve

    def keeps_more(self, keep):
        own(self, [min(k + 1, w) for k, w in zip(keep, self.widths, strict=True)])

    monkeypatch.setattr(rows.LayeredRound, "resolve", keeps_more)
    (row,) = capabilities.measure(["native"], {"full attention": "llama"})
    assert row.cells["rewind"].startswith("no: scores differ by")
    assert row.cells["speculate"].startswith("no: scores differ by")
    assert row.cells["batch"] == "yes"  # nothing is taken back there


def test_a_policy_that_refuses_the_model_is_a_row_of_reasons(monkeypatch):
    def refuse(self, target, max_width):
        raise capabilities.HeadraceError("kv: not for this model")

    monkeypatch.setattr(Native, "rows", refuse)
    (row,) = capabilities.measure(["native"], {"full attention": "llama"})
    assert row.covered == "none"
    assert set(row.cells.values()) == {"no: kv: not for this model"}
    text = capabilities.page([row])
    assert "| none           | no (1) | no (1) |" in text
    assert "\n1. Kv: not for this model.\n" in text
