"""What the program says of its settings; and limits that an error names are settings, or said to be fixed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensord
from tensord import errors
from tensord.daemon.app import main
from tensord.daemon.config import usage
from tensord.daemon.config.config import SETTINGS

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/1000"}


def test_check_config_says_where_each_value_comes_from_and_which_variables_are_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text("max_entries = 99\n")
    given = ["--config", str(file), "--check-config", "--ring-bytes=64MiB", "--json"]
    text = usage.asked(given, {**ENVIRON, "TENSORD_POLICY": "lru", "TENSORD_PORT": "tcp://10.0.0.1:9477"}) or ""
    rows = {row["key"]: (row["value"], row["source"]) for row in json.loads(text)}
    assert rows["ring_bytes"] == ("64MiB", "flag --ring-bytes")
    assert rows["max_entries"] == ("99", f"file {file}")
    assert rows["policy"] == ("lru", "env TENSORD_POLICY")
    assert rows["log.level"] == ("info", "default")
    assert capsys.readouterr().err.startswith("tensord: unknown environment variable 'TENSORD_PORT'")


def test_the_program_answers_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tensord ")
    assert main(["--drop", "-h"]) == main(["--help"]) == 0
    assert capsys.readouterr().out.count("--limits-clients-max VALUE") == 2
    assert main(["--check-config", "--max-entries", "many"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("tensord: max_entries = 'many' (flag --max-entries)")


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
