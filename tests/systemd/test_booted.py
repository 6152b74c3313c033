"""The service under a real systemd, installed with the commands that docs/systemd.md gives.

`make test-systemd` runs these tests; `make test` leaves them out. They need root.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import pytest

from .machine import CHECKOUT, Machine, missing

pytestmark = [
    pytest.mark.booted,
    pytest.mark.skipif(bool(missing()), reason=missing() or "can boot"),
]

CONTROL: Final = "/run/tensord/control.sock"
STATUS: Final = "/run/tensord/status.sock"
PYTHON: Final = "/opt/tensord/bin/python"
CTL: Final = "/opt/tensord/bin/tensorctl"
READER: Final = CHECKOUT / "tests" / "systemd" / "reader.py"
UNITS: Final = ("tensord.service", "tensord.socket", "tensord-status.socket")


def blocks_of(page: str) -> list[str]:
    """The code blocks of one page of the documentation."""
    return re.findall(r"^```\n(.*?)^```$", (CHECKOUT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


INSTALL, REMOVE, RECOVER = blocks_of("systemd.md")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine where tensord is installed as the documentation says, with two users of whom one is in its group."""
    with Machine(tmp_path_factory.mktemp("machine")) as machine:
        machine.run("bash", "-euc", f"cd {CHECKOUT}\n{INSTALL}")
        machine.run("useradd", "--groups", "tensord", "alice")
        machine.run("useradd", "mallory")
        # From here on with a small ring.
        machine.run("bash", "-euc", REMOVE)
        machine.run("systemctl", "enable", *UNITS)
        yield machine


@pytest.fixture
def machine(installed: Machine) -> Machine:
    """The machine, with the service up and nothing counted against it."""
    configure(installed, 'ring_bytes = "64MiB"')
    installed.run("systemctl", "reset-failed", check=False)
    installed.run("systemctl", "restart", "tensord.socket", "tensord-status.socket", "tensord.service")
    installed.run("systemctl", "reset-failed", check=False)
    return installed


def configure(machine: Machine, *lines: str) -> None:
    machine.run("tee", "/etc/tensord/tensord.toml", text="\n".join(lines) + "\n")


def status(machine: Machine) -> dict[str, object]:
    found = json.loads(machine.run(CTL, "--status-socket", STATUS, "status", "--json"))
    assert isinstance(found, dict)
    return found


class Reading:
    """A client within the machine that reads and verifies all the time, as the user alice."""

    def __init__(self, machine: Machine) -> None:
        self._process = subprocess.Popen(
            machine.command(PYTHON, str(READER), CONTROL, user="alice"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

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


def test_a_first_connection_starts_the_daemon(machine: Machine) -> None:
    machine.run("systemctl", "stop", "tensord.service")
    assert machine.property("ActiveState") == "inactive"
    with Reading(machine) as reading:
        reading.assert_only_right()
    assert machine.property("ActiveState") == "active"


def test_a_start_returns_when_the_daemon_serves(machine: Machine) -> None:
    machine.run("systemctl", "restart", "tensord.service")
    assert machine.property("SubState") == "running"
    assert machine.property("StatusText").startswith("serving")
    assert status(machine)["pid"] == int(machine.property("MainPID"))


def test_a_reader_never_notices_a_restart(machine: Machine) -> None:
    with Reading(machine) as reading:
        epoch = status(machine)["epoch"]
        machine.run("systemctl", "restart", "tensord.service")
        reading.assert_only_right()
        assert status(machine)["epoch"] != epoch
        reading.assert_only_right()


def test_a_reader_never_notices_kill_9(machine: Machine) -> None:
    with Reading(machine) as reading:
        before = int(machine.property("NRestarts"))
        machine.run("systemctl", "kill", "--signal=KILL", "tensord.service")
        machine.until("NRestarts", str(before + 1))
        machine.until("SubState", "running")
        reading.assert_only_right()
    assert status(machine)["recovered"]


def test_a_reader_goes_on_when_the_service_is_stopped_and_finds_everything_afterwards(machine: Machine) -> None:
    with Reading(machine) as reading:
        # A client that attaches again would start the service through its socket, so the sockets are stopped too.
        machine.run("systemctl", "stop", *UNITS)
        reading.counts()
        reading.assert_only_right()
        machine.run("systemctl", "start", "tensord.service")
        reading.assert_only_right()
    machine.run("runuser", "-u", "alice", "--", PYTHON, "-c", _GET_AGAIN)


_GET_AGAIN: Final = f"""
import sys; sys.path.insert(0, {str(READER.parent)!r})
import tensord, reader
with tensord.Client({CONTROL!r}) as client:
    with client.get(reader.KEY) as lease:
        assert (lease.tree == reader.PAYLOAD).all()
"""


def test_a_daemon_that_hangs_is_ended_and_started_again(machine: Machine) -> None:
    machine.run(
        "bash",
        "-euc",
        "mkdir -p /run/systemd/system.control /etc/systemd/system/tensord.service.d\n"
        "printf '[Service]\\nWatchdogSec=1s\\n' >/etc/systemd/system/tensord.service.d/watchdog.conf\n"
        "systemctl daemon-reload && systemctl restart tensord.service",
    )
    try:
        with Reading(machine) as reading:
            before = int(machine.property("NRestarts"))
            machine.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", "tensord.service")
            machine.until("NRestarts", str(before + 1))
            machine.until("SubState", "running")
            reading.assert_only_right()
        assert "watchdog" in machine.journal().lower()
    finally:
        machine.run("rm", "-r", "/etc/systemd/system/tensord.service.d")
        machine.run("systemctl", "daemon-reload")


def test_a_reload_changes_what_can_change_and_names_what_waits(machine: Machine) -> None:
    configure(machine, 'ring_bytes = "96MiB"', "max_tokens = 12345")
    machine.run("systemctl", "reload", "tensord.service")
    journal = wait_for_log(machine, "setting needs a restart")
    assert re.search(r'"key": "max_tokens".*"setting changed"', journal), journal
    assert machine.property("SubState") == "running"


def test_a_reload_with_a_mistake_changes_nothing(machine: Machine) -> None:
    pid = machine.property("MainPID")
    configure(machine, 'ring_bytes = "64MiB"', "max_token = 1")
    with pytest.raises(AssertionError, match="max_tokens"):
        machine.run("systemctl", "reload", "tensord.service")
    journal = wait_for_log(machine, "reload failed; the configuration is unchanged")
    assert "max_tokens" in journal, "the nearest known name is given"
    assert machine.property("MainPID") == pid
    assert machine.property("SubState") == "running"


def wait_for_log(machine: Machine, wanted: str) -> str:
    """The service's log since it was last started, once it has `wanted`."""
    invocation = machine.property("InvocationID")
    follow = subprocess.Popen(
        machine.command("journalctl", "-o", "cat", "-f", "-n", "all", f"_SYSTEMD_INVOCATION_ID={invocation}"),
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    assert follow.stdout is not None
    found = ""
    # A line that never comes is ended by the test's own time limit.
    try:
        for line in follow.stdout:
            found += line
            if wanted in line:
                return found
    finally:
        follow.kill()
        follow.wait()
        follow.stdout.close()
    raise AssertionError(f"no {wanted!r} in:\n{found}")


def test_only_members_of_the_group_may_connect(machine: Machine) -> None:
    for path in (CONTROL, STATUS):
        assert machine.run("stat", "--format=%U:%G %a", path).strip() == "tensord:tensord 660"
    refused = machine.run(PYTHON, str(READER), CONTROL, user="mallory", check=False)
    assert "SocketForbidden" in refused and "usermod -aG tensord mallory" in refused, refused
    refused = machine.run(CTL, "--status-socket", STATUS, "status", user="mallory", check=False)
    assert "usermod -aG tensord mallory" in refused, refused
    machine.run(CTL, "--status-socket", STATUS, "status", user="alice")


def test_no_other_user_can_open_the_memory(machine: Machine) -> None:
    segments = machine.run("bash", "-c", "stat --format='%U %a %n' /dev/shm/tensord.system.*").splitlines()
    assert segments
    assert all(line.startswith("tensord 600 ") for line in segments), segments
    refused = machine.run("cat", "/dev/shm/tensord.system.ring", user="alice", check=False)
    assert "Permission denied" in refused


def test_the_journal_has_the_log_as_json(machine: Machine) -> None:
    invocation = machine.property("InvocationID")
    lines = machine.run("journalctl", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={invocation}").splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    serving = [line for line in told if line.get("event") == "serving"]
    assert len(serving) == 1, lines
    assert serving[0]["ring_bytes"] == 64 << 20


_SANDBOX: Final = """
import os, pathlib, re, socket, sys
pid = sys.argv[1]
status = pathlib.Path(f"/proc/{pid}/status").read_text()
def of(name): return re.search(rf"^{name}:\\s*(.*)$", status, re.M)[1]
assert int(of("CapEff"), 16) == int(of("CapPrm"), 16) == int(of("CapBnd"), 16) == 0, status
assert of("NoNewPrivs") == "1" and of("Seccomp") == "2", status
assert of("Uid").split()[0] != "0", status
"""

_INSIDE: Final = """
import socket
for path in ("/etc/x", "/usr/x", "/var/x"):
    try:
        open(path, "w")
    except OSError:
        continue
    raise AssertionError(f"{path} could be written")
try:
    socket.socket(socket.AF_INET)
except OSError:
    pass
else:
    raise AssertionError("an internet socket could be made")
"""


def test_the_sandbox_is_in_force(machine: Machine) -> None:
    machine.run("/usr/bin/python3", "-c", _SANDBOX, machine.property("MainPID"))
    # What the daemon may do is tried by a program that runs in its place, with the same unit.
    drop_in = "/etc/systemd/system/tensord.service.d/inside.conf"
    settings = ["Type=oneshot", "Restart=no", "WatchdogSec=0", "ExecReload=", "ExecStart="]
    text = "\n".join(["[Service]", *settings, f"ExecStart={PYTHON} /run/inside.py", ""])
    machine.run("mkdir", "-p", str(Path(drop_in).parent))
    machine.run("tee", drop_in, text=text)
    machine.run("tee", "/run/inside.py", text=_INSIDE)
    try:
        machine.run("systemctl", "stop", *UNITS)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "tensord.service")
    finally:
        machine.run("rm", "-r", str(Path(drop_in).parent))
        machine.run("systemctl", "daemon-reload")


def test_after_five_crashes_in_a_minute_the_documented_commands_start_it_again_with_its_entries(
    machine: Machine,
) -> None:
    with Reading(machine) as reading:
        for _ in range(6):
            if machine.until("ActiveState", "active", "failed") == "failed":
                break
            pid = machine.until_running()
            machine.run("systemctl", "kill", "--signal=KILL", "tensord.service", check=False)
            machine.until_not(pid)
        machine.until("ActiveState", "failed")
        reading.counts()
        reading.assert_only_right()
        machine.run("bash", "-euc", RECOVER)
        machine.until("SubState", "running")
        reading.assert_only_right()
    machine.run("runuser", "-u", "alice", "--", PYTHON, "-c", _GET_AGAIN)


def test_the_documented_commands_stop_it_for_good_and_free_its_memory(machine: Machine) -> None:
    assert machine.run("ls", "/dev/shm")
    machine.run("bash", "-euc", REMOVE)
    assert machine.run("ls", "/dev/shm") == ""
    machine.run("systemctl", "enable", *UNITS)
