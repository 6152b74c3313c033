"""Every link between the pages of the documentation leads to a file, and to a heading of it where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]


def text_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def links_of(page: Path) -> list[str]:
    """The targets of a page's links to other pages."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    broken = []
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        if not leads_to.exists() or (anchor and anchor not in anchors_of(leads_to)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_of_the_source_that_a_page_names_exists(page: str) -> None:
    named = re.findall(r"`((?:client|daemon|ipc|shm|tests|benchmarks|tensord)/[\w/.]*)`", (ROOT / page).read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    index = ROOT / "docs" / "README.md"
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {index.name}
    assert pages - set(links_of(index)) == set()


def figures_of(text: str) -> set[tuple[str, ...]]:
    """The rows of tables, without empty cells: two tables may differ in columns."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return {tuple(cell.strip() for cell in row.split("|") if cell.strip()) for row in rows}


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    rows = figures_of((ROOT / "README.md").read_text().split("Medians in µs")[1].split("\n## ")[0].split("|---|")[-1])
    assert len(rows) > 3
    assert rows <= figures_of((ROOT / "docs" / "benchmarks.md").read_text())
