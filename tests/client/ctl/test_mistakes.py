"""Wrong things typed at every command: one line that says what to do, and never a traceback."""

from __future__ import annotations

import shlex
import socket
import subprocess
from pathlib import Path

import click
import pytest

from tensord.client.ctl.app import cli

from ...daemon_process import PATIENCE_S, Daemon
from .conftest import COMMAND, Ctl

MISTAKES = [
    *(
        "''",
        "no-such-command",
        "--no-such-option status",
        "--socket",
        "--socket '' status",
        "--status-socket '' status",
    ),
    *(f"--timeout {given} status" for given in ("soon", "0", "nan", "2h")),
    *("status now", "health --quick", "doctor --fix", "config a b", "reload now", "install now", "purge everything"),
    *("ls --count 0", "ls --namespace-tag 12", "why", "why xyz", "advise more", "clients -x", "latency --over soon"),
    *("watch --count -1", "limit much", "limit 0", "evict all", "clear"),
    *("clear --yes --namespace-tag x", "room much", "room 8GiB --for 0", "room 8GiB --wait 25h"),
]
NEEDS_A_DAEMON = [
    *("status", "status --json", "ls", "why 12", f"why {'12' * 32}", "clients", "watch", "limit 1GiB", "room 1GiB"),
    *(f"evict {'12' * 32}", "clear --yes", "health", "config", "reload", "latency"),
]


@pytest.mark.parametrize("words", MISTAKES)
def test_a_usage_error_is_one_line_and_exit_code_2(alone: Ctl, words: str) -> None:
    told = alone(*shlex.split(words), code=2)
    assert told.out == ""
    assert "--help`" in told.err


def test_there_is_a_mistake_for_every_command() -> None:
    assert set(cli.commands) <= {words.split()[0] for words in MISTAKES}


@pytest.mark.parametrize("words", NEEDS_A_DAEMON)
def test_without_a_daemon_each_command_says_how_to_start_one(alone: Ctl, words: str) -> None:
    told = alone(*shlex.split(words), code=1)
    assert "systemctl start tensord" in told.err
    assert told.out == ""


@pytest.mark.parametrize("words", [["status"], ["limit", "1GiB"]], ids=" ".join)
def test_a_socket_served_by_another_program_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    listening = []
    for name in ("control.sock", "status.sock"):
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(tmp_path / name))
        made.listen()
        listening.append(made)
    told = Ctl(capsys, tmp_path / "control.sock")("--timeout", "50ms", *words, code=1)
    assert "no answer within 0.05 s" in told.err
    for made in listening:
        made.close()


def test_a_socket_given_in_place_of_another_one_is_named_as_what_it_is(
    daemon: Daemon, ctl: Ctl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "this is the control socket" in ctl("--status-socket", str(daemon.socket), "status", code=1).err
    asked = Ctl(capsys, daemon.status_socket)
    assert "this is the status socket" in asked("evict", "12" * 32, code=1).err


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_that_fits_100_columns(alone: Ctl, name: str) -> None:
    lines = alone(name, "--help").out.splitlines()
    assert max(map(len, lines)) <= 100
    assert isinstance(cli.commands[name], click.Command)
    assert cli.commands[name].help


def test_an_output_that_takes_no_more_is_named(ctl: Ctl) -> None:
    with open("/dev/full", "w") as full:
        command = [*COMMAND, *ctl.flags, "status"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (1, "tensorctl: [Errno 28] No space left on device\n")
