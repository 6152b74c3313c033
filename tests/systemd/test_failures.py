"""What the service does when its daemon fails, and what each signal keeps or frees.

`make test-systemd` runs these tests; `make test` leaves them out. They need root.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .machine import Machine
from .service import BOOTED, GET_AGAIN, PYTHON, RECOVER, REMOVE, UNITS, Reading, status

pytestmark = BOOTED


@pytest.fixture
def tried_again_soon(machine: Machine) -> Iterator[Machine]:
    """The limit of starts and the timer, of seconds in place of a minute, with the same relation."""
    changes = {
        "tensord.service": "[Unit]\nStartLimitIntervalSec=20s\nStartLimitBurst=2",
        "tensord-retry.timer": "[Timer]\nOnActiveSec=\nOnActiveSec=21s",
    }
    for unit, text in changes.items():
        machine.run("mkdir", f"/etc/systemd/system/{unit}.d")
        machine.run("tee", f"/etc/systemd/system/{unit}.d/soon.conf", text=f"{text}\n")
    machine.run("systemctl", "daemon-reload")
    yield machine
    machine.run("systemctl", "stop", "tensord-retry.timer")
    for unit in changes:
        machine.run("rm", "-r", f"/etc/systemd/system/{unit}.d")
    machine.run("systemctl", "daemon-reload")


def crash_until_given_up(machine: Machine) -> None:
    for _ in range(6):
        if machine.until("ActiveState", "active", "failed") == "failed":
            break
        pid = machine.until_running()
        machine.run("systemctl", "kill", "--signal=KILL", "tensord.service", check=False)
        machine.until_not(pid)
    machine.until("ActiveState", "failed")


def test_a_service_that_was_given_up_is_started_again_with_its_entries(tried_again_soon: Machine) -> None:
    machine = tried_again_soon
    with Reading(machine) as reading:
        for _ in range(2):
            crash_until_given_up(machine)
            machine.until("SubState", "running")
            machine.until("SubState", "running", unit="tensord.socket")
            reading.counts()
            reading.assert_only_right()


@pytest.mark.parametrize("given_up", [True, False])
def test_the_documented_commands_stop_it_for_good_end_its_retries_and_free_its_memory(
    request: pytest.FixtureRequest, machine: Machine, given_up: bool
) -> None:
    if given_up:
        request.getfixturevalue("tried_again_soon")
        crash_until_given_up(machine)
        assert machine.property("ActiveState", "tensord-retry.timer") == "active"
    assert machine.run("ls", "/dev/shm")
    machine.run("bash", "-euc", REMOVE)
    assert machine.property("ActiveState", "tensord-retry.timer") == "inactive"
    assert machine.run("ls", "/dev/shm") == ""
    machine.run("systemctl", "enable", *UNITS)


@pytest.mark.parametrize(
    ("signal", "kept"), [("TERM", True), ("KILL", True), ("ABRT", True), ("INT", False)], ids=lambda value: str(value)
)
def test_a_signal_keeps_or_frees_the_entries_as_documented(machine: Machine, signal: str, kept: bool) -> None:
    with Reading(machine):
        pass
    pid = machine.until_running()
    machine.run("systemctl", "kill", f"--signal={signal}", "--kill-whom=main", "tensord.service")
    machine.until_not(pid)
    machine.run("systemctl", "start", "tensord.service")
    machine.until("SubState", "running")
    store = status(machine)["store"]
    assert isinstance(store, dict)
    assert (store["entries"] > 0) is kept


def test_after_five_crashes_in_a_minute_the_documented_commands_start_it_again_with_its_entries(
    machine: Machine,
) -> None:
    with Reading(machine) as reading:
        crash_until_given_up(machine)
        reading.counts()
        reading.assert_only_right()
        machine.run("bash", "-euc", RECOVER)
        machine.until("SubState", "running")
        reading.assert_only_right()
    machine.run("runuser", "-u", "alice", "--", PYTHON, "-c", GET_AGAIN)
