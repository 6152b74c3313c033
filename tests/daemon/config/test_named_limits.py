"""Every limit that an error names is a setting, which can be raised, or is said to be fixed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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


def test_a_limit_that_an_error_names_is_a_setting_or_said_to_be_fixed() -> None:
    found = [(place, text, LIMIT.findall(text)) for place, text in refusals()]
    assert sum(bool(names) for _, _, names in found) > 10
    known = {*SETTINGS, *LAST_NAMES}
    assert not [(place, names) for place, text, names in found if "fixed limit" not in text and set(names) - known]
