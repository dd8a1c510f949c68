"""What a newcomer reads leads on: links, and the README's table of what can be chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(ROOT.glob("[!.]*/**/*.md"))
NO_ROW = {"stage", "debug", "tuning"}  # nobody chooses among those to serve


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_readme_names_every_group_and_every_page():
    rows = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    groups = {folder.name for folder in (ROOT / "conf").iterdir() if list(folder.glob("*.yaml"))}
    assert [group for group in sorted(groups - NO_ROW) if f"`{group}=`" not in rows] == []
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"docs/{p.name}" not in README] == []
