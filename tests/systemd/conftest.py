"""One machine for all booted tests, with tensord installed as docs/systemd.md says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .machine import CHECKOUT, Machine
from .service import INSTALL, REMOVE, UNITS, configure


@pytest.fixture(scope="session")
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
