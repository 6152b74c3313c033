"""The Debian package on a machine without tensord: installed, upgraded, removed and purged under a real systemd.

`make test-systemd` runs these tests; `make test` leaves them out. They need root.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from .machine import CHECKOUT, Machine
from .service import BOOTED, DEB

pytestmark = BOOTED

DROP_INS = "/etc/systemd/system/tensord.service.d"
PUT = """
import tensord
with tensord.Client("/run/tensord/control.sock") as client:
    assert client.put(bytes(range(32)), [1, 2, 3], wait=True, timeout_s=30).state == "stored"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the package installed by the documented commands, of which the first runs outside."""
    build, install, _ = DEB.splitlines()
    made = subprocess.run(build.split(), cwd=CHECKOUT, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stdout + made.stderr
    with Machine(tmp_path_factory.mktemp("machine")) as booted:
        assert (
            booted.run("bash", "-c", "command -v tensord; ls -d /opt/tensord", check=False).count("/bin/tensord") == 0
        )
        booted.run("mkdir", "-p", DROP_INS)
        booted.run("tee", f"{DROP_INS}/small.conf", text="[Service]\nEnvironment=TENSORD_RING_BYTES=16MiB\n")
        apt(booted, install)
        yield booted


def apt(machine: Machine, command: str) -> None:
    machine.run("env", "DEBIAN_FRONTEND=noninteractive", "bash", "-euc", f"cd {CHECKOUT}\n{command} --yes")


def status(machine: Machine) -> dict[str, object]:
    found = json.loads(machine.run("tensorctl", "status", "--json"))
    assert isinstance(found, dict)
    return found


def test_the_service_serves_once_the_package_is_installed(machine: Machine) -> None:
    *_, look = DEB.splitlines()
    assert "instance system" in machine.run(*look.split())
    assert machine.property("SubState") == "running"
    assert machine.property("FragmentPath") == "/usr/lib/systemd/system/tensord.service"
    for unit in ("tensord.service", "tensord.socket", "tensord-status.socket"):
        assert machine.run("systemctl", "is-enabled", unit).strip() == "enabled"
    assert machine.run("stat", "--format=%U:%G %a", "/run/tensord/control.sock").strip() == "tensord:tensord 660"


def test_nothing_of_the_folder_that_it_was_built_in_is_left(machine: Machine) -> None:
    assert (
        machine.run("grep", "-rlIE", f"{CHECKOUT}|/tmp/tmp", "/opt/tensord/bin", "/opt/tensord/pyvenv.cfg", check=False)
        == ""
    )
    broken = machine.run("find", "/opt/tensord", "-xtype", "l")
    assert broken == ""


def test_tensorctl_leaves_the_service_to_the_package(machine: Machine) -> None:
    assert "a package of the distribution has installed the service" in machine.run("tensorctl", "install", check=False)


def test_an_upgrade_restarts_the_daemon_and_keeps_entries_and_configuration(machine: Machine) -> None:
    machine.run("bash", "-c", "echo '# mine' >>/etc/tensord/tensord.toml")
    machine.run("/opt/tensord/bin/python", "-c", PUT)
    before = status(machine)
    _, install, _ = DEB.splitlines()
    apt(machine, install.replace("install", "install --reinstall"))
    machine.until("SubState", "running")
    after = status(machine)
    assert after["pid"] != before["pid"]
    store = after["store"]
    assert isinstance(store, dict) and store["entries"] == 1
    assert machine.run("tail", "-n", "1", "/etc/tensord/tensord.toml") == "# mine\n"


def test_an_upgrade_does_not_start_what_the_operator_has_stopped_for_good(machine: Machine) -> None:
    units = ("tensord.service", "tensord.socket", "tensord-status.socket")
    machine.run("systemctl", "disable", "--now", *units)
    _, install, _ = DEB.splitlines()
    apt(machine, install.replace("install", "install --reinstall"))
    for unit in units:
        assert machine.property("ActiveState", unit) == "inactive"
    machine.run("systemctl", "enable", "--now", "tensord.service")


def test_a_removal_stops_everything_and_frees_the_memory_and_a_purge_leaves_no_file(machine: Machine) -> None:
    apt(machine, "apt-get remove tensord")
    assert machine.property("LoadState") == "not-found"
    assert machine.run("bash", "-c", "ls /dev/shm; ls /run/tensord/*.sock 2>/dev/null; pgrep -u tensord || true") == ""
    assert machine.run("ls", "/etc/tensord").split() == ["tensord.toml"]
    _, install, _ = DEB.splitlines()
    apt(machine, install)
    assert status(machine)["instance"] == "system", "it can be installed again"
    apt(machine, "apt-get purge tensord")
    machine.run("rm", "-r", DROP_INS)
    left = machine.run(
        "bash", "-c", "find /etc /opt /run /usr/lib/systemd /usr/lib/*.d /var/lib -name 'tensord*'"
    ).split()
    assert [path for path in left if not path.startswith("/var/lib/dpkg/info")] == []
