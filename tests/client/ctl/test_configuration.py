from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tensord.client.ctl import configuration
from tensord.errors import BadConfiguration

from .conftest import Ctl


def test_config_check_says_what_a_daemon_here_would_have_and_why(
    alone: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text('ring_bytes = "96MiB"\n[limits]\nclients_max = 7\n')
    monkeypatch.setenv("TENSORD_POLICY", "lfu")
    rows = {row["key"]: row for row in json.loads(alone("config", "check", "--config", str(file), "--json").out)}
    assert (rows["ring_bytes"]["value"], rows["ring_bytes"]["source"]) == ("96MiB", f"file {file}")
    assert rows["policy"]["source"] == "env TENSORD_POLICY"
    assert rows["limits.clients_max"] == {
        "key": "limits.clients_max",
        "value": "7",
        "source": f"file {file}",
        "reload": True,
    }
    lines = alone("config", "check", "--config", str(file)).out.splitlines()
    (line,) = (line for line in lines if line.startswith("limits.clients_max "))
    assert line.split() == ["limits.clients_max", "7", "file", str(file), "yes"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ring_bites = 1", "did you mean 'ring_bytes'"),
        ('ring_bytes = "plenty"', "must be a size in bytes"),
        ("ring_bytes = [", "is not valid TOML"),
    ],
)
def test_a_setting_that_a_daemon_refuses_is_the_same_error(alone: Ctl, tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "tensord.toml"
    file.write_text(text)
    err = alone("config", "check", "--config", str(file), code=1).err
    assert told in err
    assert "tensord: " not in err


def test_unknown_variables_are_named_beside_the_settings(alone: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_PORT", "tcp://10.0.0.1:9477")
    said = alone("config", "check", "--json")
    assert any(row["key"] == "ring_bytes" for row in json.loads(said.out))
    assert "unknown environment variable 'TENSORD_PORT'" in said.err


def test_a_file_that_is_not_there_is_an_error(alone: Ctl) -> None:
    assert "/no/such/file cannot be read" in alone("config", "check", "--config", "/no/such/file", code=1).err


def test_a_daemon_program_that_cannot_be_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_DAEMON", ("false",))
    with pytest.raises(BadConfiguration, match="ended with 1"):
        configuration.checked()
    monkeypatch.setattr(configuration, "_DAEMON", ("sleep", "60"))
    with pytest.raises(BadConfiguration, match="did not end"):
        configuration.checked(timeout_s=0.05)


def test_nothing_of_the_daemon_is_imported_for_it() -> None:
    code = (
        "import sys, tensord.client.ctl.app; sys.exit(any(name.startswith('tensord.daemon') for name in sys.modules))"
    )
    assert subprocess.run([configuration._DAEMON[0], "-c", code], check=False).returncode == 0
