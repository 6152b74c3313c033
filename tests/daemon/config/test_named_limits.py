"""Every limit that an error names is a setting, which can be raised, or is said to be fixed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensord
from tensord import errors
from tensord.daemon.config.config import SETTINGS

SOURCES = Path(tensord.__file__).parent
LAST_NAMES = {name.rpartition(".")[2] for name in SETTINGS}
LIMIT = re.compile(r"(?<!\w)(?:[a-z_]+\.)?(?:[a-z_]+_(?:s_)?max|max_[a-z]+)(?!\w)")


def refusals() -> Iterator[tuple[str, str]]:
    """(place, text) of each error that the daemon's code makes. The values in a text are left out."""
    for path in sorted((SOURCES / "daemon").resolve().rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(errors, node.func.id):
                parts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
                yield f"{path.name}:{node.lineno}", " ".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(("place", "text"), list(refusals()))
def test_a_limit_that_an_error_names_is_a_setting_or_said_to_be_fixed(place: str, text: str) -> None:
    for name in LIMIT.findall(text):
        assert name in {*SETTINGS, *LAST_NAMES} or "fixed limit" in text, f"{place} names {name}, which is no setting"


def test_the_errors_of_the_daemon_name_limits() -> None:
    assert sum(bool(LIMIT.search(text)) for _, text in refusals()) > 10
