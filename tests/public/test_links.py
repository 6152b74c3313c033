"""What pages and source name is there: links and headings, files, tests, calls that raise, limits, and the version."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tensord
from docs import reference
from tensord.client.ctl.app import cli
from tensord.daemon.config.config import SETTINGS

from ..faults.test_what_raises import RAISES
from ..processes import python
from .pages import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]


def text_of(page: Path) -> str:
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


def test_every_file_that_the_source_names_with_its_room_exists() -> None:
    """A room is named from the root, or from a folder that the file lies in."""
    gone: list[str] = []
    named = 0
    for package in ("client", "daemon", "ipc", "shm"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for name in re.findall(r"(?<![\w/.-])(?:[a-z_]+/)+[a-z_0-9]+\.py\b", file.read_text()):
                named += 1
                if not any((ROOT / folder / name).exists() for folder in file.relative_to(ROOT).parents):
                    gone.append(f"{file.relative_to(ROOT)}: {name}")
    assert named > 20, "no names were found"
    assert gone == []


# ---- docs/reliability.md


RELIABILITY = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", RELIABILITY)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=["::".join(filter(None, named)) for named in NAMED])
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert len(NAMED) > 40, "the page names tests"
    body = ast.parse((ROOT / "tests" / path).read_text()).body
    assert not name or name in {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("of", list(RAISES), ids=lambda of: of.__name__)
def test_the_calls_that_raise_are_those_of_the_page(of: type[object]) -> None:
    row = next(line for line in RELIABILITY.splitlines() if re.match(rf"\| `{of.__name__}`[,|  ]", line))
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(RAISES[of])


def test_changelog_and_readme_name_the_version_of_the_package() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in (tensord.__version__, "Unreleased")
    series = ".".join(tensord.__version__.split(".")[:2])
    assert f"version {series}:" in (ROOT / "README.md").read_text()


def test_both_programs_print_the_version_of_the_package() -> None:
    for module, program in (("tensord.daemon", "tensord"), ("tensord.client.ctl", "tensorctl")):
        told = python("-m", module, "--version")
        assert told.stdout == f"{program} {tensord.__version__}\n"


def test_a_free_threaded_python_is_refused_with_one_sentence() -> None:
    # Its abiflags alone tell such a build.
    told = python("-c", "import sys; sys.abiflags = 't'; import tensord")
    assert told.returncode == 1
    assert "ImportError: tensord does not run on a free-threaded build of Python: use" in told.stderr


def test_the_site_has_a_page_for_every_public_name() -> None:
    rows = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(named) == sorted({*tensord.__all__, "errors"} - {"__version__", "TensordError"})


def test_the_tables_of_the_site_name_every_setting_metric_and_command() -> None:
    assert sum(line.startswith("| `") for line in reference.settings()) == len(SETTINGS)
    assert sum(line.startswith("| `tensord_") for line in reference.all_metrics()) > 50
    assert sum(line.startswith("## tensorctl ") for line in reference.commands()) == len(cli.commands)
