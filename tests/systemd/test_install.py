"""`tensorctl install` under a real systemd: what a second run and a removal do to a service that runs.

`make test-systemd` runs these tests; `make test` leaves them out. They need root.
"""

from __future__ import annotations

from .machine import Machine
from .service import BOOTED, CTL, INSTALL, UNINSTALL, configure, status

pytestmark = BOOTED


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
    machine.run("bash", "-euc", UNINSTALL)
    try:
        assert machine.property("LoadState") == "not-found"
        assert machine.run("bash", "-c", "find /etc /run -path '*tensord*' -type f -o -name 'tensord*.wants'") == (
            "/etc/tensord/tensord.toml\n"
        )
        assert machine.run("pgrep", "-u", "tensord", check=False) == ""
    finally:
        machine.run("bash", "-euc", "\n".join(INSTALL.splitlines()[1:]))
    machine.until("SubState", "running")
