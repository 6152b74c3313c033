from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import pytest

from ...daemon_process import Daemon
from .conftest import COMMAND, Ctl


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(alone: Ctl, shell: str) -> None:
    script = alone("completion", shell).out
    assert f"_TENSORCTL_COMPLETE={shell}_complete" in script
    assert "%(" not in script


def test_the_script_is_one_that_bash_takes(alone: Ctl) -> None:
    script = alone("completion", "bash").out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def _completed(words: Sequence[str]) -> list[str]:
    environ = {"COMP_WORDS": " ".join(["tensorctl", *words]), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        COMMAND,
        env={**os.environ, **environ, "_TENSORCTL_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands_and_options_are_completed() -> None:
    assert _completed(["st"]) == ["status"]
    assert "--watch" in _completed(["status", "--w"])
    assert _completed(["config", ""]) == ["check", "get"]


def test_stored_keys_are_completed(daemon: Daemon) -> None:
    client = daemon.client()
    for key in (b"\x12" * 32, b"\x13" * 32, b"\x20" * 32):
        client.put(key, 1, wait=True)
    at = ["--socket", str(daemon.socket)]
    assert sorted(_completed([*at, "show", "1"])) == ["12" * 32, "13" * 32]
    assert _completed([*at, "evict", "20"]) == ["20" * 32]


def test_without_a_daemon_no_keys_are_completed_and_nothing_is_said() -> None:
    assert _completed(["--socket", "/no/such.sock", "show", "1"]) == []
