"""A user's own service, installed with the commands of docs/systemd.md, under a user's service manager.

`make test-systemd` runs these tests; `make test` leaves them out. They need root.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .machine import CHECKOUT, Machine
from .service import BOOTED, USER

pytestmark = BOOTED

NAME = "carol"
HOME = f"/home/{NAME}"


class Session:
    """Commands of the user, in an environment as at a login."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._runtime = f"/run/user/{machine.run('id', '--user', NAME).strip()}"

    def __call__(self, command: str, *, check: bool = True) -> str:
        environ = [f"HOME={HOME}", f"XDG_RUNTIME_DIR={self._runtime}"]
        # The manager of a user looks for units in that user's folders.
        words = ["env", "-u", "SYSTEMD_UNIT_PATH", *environ, "bash", "-euc", f"cd {CHECKOUT}\n{command}"]
        return self._machine.run(*words, user=NAME, check=check)

    def start_manager(self) -> None:
        """What logind starts at the login of a user."""
        self._machine.run("install", "-d", "-m", "700", "-o", NAME, "-g", NAME, self._runtime)
        given = ("Delegate=yes", "Type=notify", f"Environment=HOME={HOME} XDG_RUNTIME_DIR={self._runtime}")
        properties = [f"--property={each}" for each in given]
        program = ("/lib/systemd/systemd", "--user")
        self._machine.run("systemd-run", f"--uid={NAME}", "--unit=manager", *properties, *program)


@pytest.fixture(scope="module")
def session(installed: Machine) -> Iterator[Session]:
    installed.run("useradd", "--create-home", NAME)
    opened = Session(installed)
    opened.start_manager()
    opened(USER.splitlines()[0])
    yield opened
    installed.run("systemctl", "stop", "manager")


def test_the_documented_commands_serve_a_user_and_an_uninstallation_removes_everything(session: Session) -> None:
    _, install, enable = USER.splitlines()
    told = session(install)
    assert f"ExecStart={HOME}/tensord/bin/tensord" in session("cat ~/.config/systemd/user/tensord.service")
    assert "systemctl --user enable --now tensord.service" in told
    session("printf 'ring_bytes = \"16MiB\"\\n' >~/.config/tensord/tensord.toml")
    session(enable)
    found = json.loads(session("~/tensord/bin/tensorctl status --json"))
    assert found["instance"].startswith("user-")
    assert session("systemctl --user is-active tensord.service").strip() == "active"
    session("~/tensord/bin/tensorctl install --user --uninstall")
    assert session("find ~/.config -type f -o -type l") == f"{HOME}/.config/tensord/tensord.toml\n"
    assert session("systemctl --user is-active tensord.service tensord.socket", check=False).split() == ["inactive"] * 2
    session("~/tensord/bin/tensorctl purge --yes")


def test_the_unit_of_a_pipx_installation_runs_its_link(session: Session) -> None:
    # pipx lays its environments and links so.
    session("mkdir -p ~/.local/bin && ln -sf ~/tensord/bin/tensord ~/tensord/bin/tensorctl ~/.local/bin/")
    session("~/.local/bin/tensorctl install --user")
    assert "ExecStart=%h/.local/bin/tensord\n" in session("cat ~/.config/systemd/user/tensord.service")
    session("systemctl --user enable --now tensord.service && ~/.local/bin/tensorctl health")
    session("~/.local/bin/tensorctl install --user --uninstall && ~/.local/bin/tensorctl purge --yes")
