"""docs/reliability.md names tests that exist, and the calls that raise as the tests have them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .faults.test_what_raises import RAISES

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE)))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize(("path", "name"), NAMED, ids=["::".join(filter(None, named)) for named in NAMED])
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    body = ast.parse((TESTS / path).read_text()).body
    assert not name or name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("of", list(RAISES), ids=lambda of: of.__name__)
def test_the_calls_that_raise_are_those_of_the_page(of: type[object]) -> None:
    row = next(line for line in PAGE.splitlines() if re.match(rf"\| `{of.__name__}`[,|  ]", line))
    assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(RAISES[of])
