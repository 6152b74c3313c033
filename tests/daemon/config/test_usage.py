from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensord.daemon.app import main
from tensord.daemon.config import usage

ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/1000"}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_flag(flag: str) -> None:
    text = usage.asked(["--drop", flag], ENVIRON)
    assert text is not None
    assert "--limits-clients-max VALUE" in text
    assert "--check-config" in text


def test_check_config_says_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text("max_entries = 99\n")
    given = ["--config", str(file), "--check-config", "--ring-bytes=64MiB", "--json"]
    text = usage.asked(given, {**ENVIRON, "TENSORD_POLICY": "lru"}) or ""
    rows = {row["key"]: (row["value"], row["source"]) for row in json.loads(text)}
    assert rows["ring_bytes"] == ("64MiB", "flag --ring-bytes")
    assert rows["max_entries"] == ("99", f"file {file}")
    assert rows["policy"] == ("lru", "env TENSORD_POLICY")
    assert rows["log.level"] == ("info", "default")


def test_check_config_names_the_variables_that_are_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    text = usage.asked(["--check-config", "--json"], {**ENVIRON, "TENSORD_PORT": "tcp://10.0.0.1:9477"})
    assert text is not None and json.loads(text)
    assert capsys.readouterr().err.startswith("tensord: unknown environment variable 'TENSORD_PORT'")


def test_the_program_answers_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tensord ")
    assert main(["--check-config", "--max-entries", "many"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("tensord: max_entries = 'many' (flag --max-entries)")
