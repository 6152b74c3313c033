"""The service in a booted machine: its places, its configuration and status, and a client that reads all the time.

Owns: what the tests of this folder share. Does not own: the machine (machine.py), the fixtures (conftest.py).
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Final, Self

import pytest

from .machine import CHECKOUT, Machine, missing

BOOTED: Final = [pytest.mark.booted, pytest.mark.skipif(bool(missing()), reason=missing() or "can boot")]

CONTROL: Final = "/run/tensord/control.sock"
STATUS: Final = "/run/tensord/status.sock"
PYTHON: Final = "/opt/tensord/bin/python"
CTL: Final = "/opt/tensord/bin/tensorctl"
READER: Final = CHECKOUT / "tests" / "systemd" / "reader.py"
UNITS: Final = ("tensord.service", "tensord.socket", "tensord-status.socket")


def blocks_of(page: str) -> list[str]:
    """The code blocks of one page of the documentation."""
    return re.findall(r"^```\n(.*?)^```$", (CHECKOUT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


INSTALL, REMOVE, UNINSTALL, RECOVER, RENEW, USER = blocks_of("systemd.md")


def configure(machine: Machine, *lines: str) -> None:
    machine.run("tee", "/etc/tensord/tensord.toml", text="\n".join(lines) + "\n")


def status(machine: Machine) -> dict[str, object]:
    found = json.loads(machine.run(CTL, "--status-socket", STATUS, "status", "--json"))
    assert isinstance(found, dict)
    return found


class Reading:
    """A client within the machine that reads and verifies all the time, as the user alice."""

    def __init__(self, machine: Machine) -> None:
        command, pipe = machine.command(PYTHON, str(READER), CONTROL, user="alice"), subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/")

    def __enter__(self) -> Self:
        assert self._line() == "reading"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def counts(self) -> dict[str, int]:
        """What its reads found since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, int] = json.loads(self._line())
        return found

    def assert_only_right(self) -> None:
        """Every read since the last call found the right bytes, and there were at least 100."""
        counts = self.counts()
        assert counts["right"] >= 100, counts
        assert (counts["wrong"], counts["missed"], counts["raised"]) == (0, 0, 0)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


GET_AGAIN: Final = f"""
import sys; sys.path.insert(0, {str(READER.parent)!r})
import tensord, reader
with tensord.Client({CONTROL!r}) as client:
    with client.get(reader.KEY) as lease:
        assert (lease.tree == reader.PAYLOAD).all()
"""
