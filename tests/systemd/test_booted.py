"""The service under a real systemd, installed with the commands that docs/systemd.md gives.

`make test-systemd` runs these tests; `make test` leaves them out. They need root.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..daemon_process import until
from . import service
from .machine import Machine
from .service import BOOTED, CONTROL, CTL, GET_AGAIN, PYTHON, READER, STATUS, UNITS, Reading, configure, status

pytestmark = BOOTED


def test_a_first_connection_starts_the_daemon(machine: Machine) -> None:
    machine.run("systemctl", "stop", "tensord.service")
    assert machine.property("ActiveState") == "inactive"
    with Reading(machine) as reading:
        reading.assert_only_right()
    assert machine.property("ActiveState") == "active"


def test_a_reader_never_notices_kill_9(machine: Machine) -> None:
    with Reading(machine) as reading:
        before = int(machine.property("NRestarts"))
        machine.run("systemctl", "kill", "--signal=KILL", "tensord.service")
        machine.until("NRestarts", str(before + 1))
        machine.until("SubState", "running")
        reading.assert_only_right()
    assert status(machine)["recovered"]


def test_sockets_that_were_removed_are_made_anew_by_systemd_once_they_are_restarted(machine: Machine) -> None:
    def looks() -> str:
        return machine.run("stat", "--format=%a %U %G", CONTROL, STATUS)

    before = looks()
    with Reading(machine) as reading:
        machine.run("rm", "-r", str(Path(CONTROL).parent))
        machine.run("bash", "-euc", service.RENEW)
        machine.run("systemctl", "stop", "tensord.service")
        assert looks() == before, "systemd's own sockets, which start the service again"
        machine.run("runuser", "-u", "alice", "--", PYTHON, "-c", GET_AGAIN)
        reading.assert_only_right()


def test_a_daemon_that_hangs_is_ended_and_started_again(machine: Machine) -> None:
    machine.run(
        "bash",
        "-euc",
        "mkdir -p /run/systemd/system.control /etc/systemd/system/tensord.service.d\n"
        "printf '[Service]\\nWatchdogSec=5s\\n' >/etc/systemd/system/tensord.service.d/watchdog.conf\n"
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
    of_this_start = ("-o", "cat", f"_SYSTEMD_INVOCATION_ID={machine.property('InvocationID')}")
    until(lambda: "setting needs a restart" in machine.journal(*of_this_start), "the log to name the ring's size")
    assert re.search(r'"key": "max_tokens".*"setting changed"', machine.journal(*of_this_start))
    assert machine.property("SubState") == "running"


def test_only_members_of_the_group_may_connect_and_no_other_user_can_open_the_memory(machine: Machine) -> None:
    for path in (CONTROL, STATUS):
        assert machine.run("stat", "--format=%U:%G %a", path).strip() == "tensord:tensord 660"
    refused = machine.run(PYTHON, str(READER), CONTROL, user="mallory", check=False)
    assert "SocketForbidden" in refused and "usermod -aG tensord mallory" in refused, refused
    refused = machine.run(CTL, "--status-socket", STATUS, "status", user="mallory", check=False)
    assert "usermod -aG tensord mallory" in refused, refused
    machine.run(CTL, "--status-socket", STATUS, "status", user="alice")
    segments = machine.run("bash", "-c", "stat --format='%U %a %n' /dev/shm/tensord.system.*").splitlines()
    assert segments
    assert all(line.startswith("tensord 600 ") for line in segments), segments
    refused = machine.run("cat", "/dev/shm/tensord.system.ring", user="alice", check=False)
    assert "Permission denied" in refused


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
    pid = machine.property("MainPID")
    machine.run("/usr/bin/python3", "-c", _SANDBOX, pid)
    assert machine.run("ps", "-o", "ni=", "-p", pid).strip() == "-10"
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


def test_a_second_installation_changes_nothing(machine: Machine) -> None:
    before = machine.run("bash", "-c", "cat /etc/systemd/system/tensord*")
    done = machine.run(CTL, "install").splitlines()
    assert [line for line in done if line.startswith(("write", "remove"))] == []
    assert machine.run("bash", "-c", "cat /etc/systemd/system/tensord*") == before
    assert status(machine)["pid"] == int(machine.property("MainPID")), "the daemon serves on"


def test_a_wrong_configuration_file_is_found_by_the_installation(machine: Machine) -> None:
    configure(machine, "ring_bites = 1")
    refused = machine.run(CTL, "install", check=False)
    assert "did you mean 'ring_bytes'" in refused


def test_an_uninstallation_stops_the_units_and_leaves_only_what_was_changed(machine: Machine) -> None:
    machine.run("bash", "-euc", service.UNINSTALL)
    try:
        assert machine.property("LoadState") == "not-found"
        assert machine.run("bash", "-c", "find /etc /run -path '*tensord*' -type f -o -name 'tensord*.wants'") == (
            "/etc/tensord/tensord.toml\n"
        )
        assert machine.run("pgrep", "-u", "tensord", check=False) == ""
    finally:
        machine.run("bash", "-euc", "\n".join(service.INSTALL.splitlines()[1:]))
    machine.until("SubState", "running")
