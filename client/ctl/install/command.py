"""`install`: the service under systemd, for the host or for one user.

Owns: the order of the steps, the output. Does not own: the steps (plan.py), the refusals (refusals.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from ....ipc.places import home_folder
from ..doctor import facts
from . import files, plan, refusals
from .files import SERVICE, UnitPlaces
from .plan import PlannedStep, run

SOCKETS: Final = ("tensord.socket", "tensord-status.socket")


@click.command()
@click.option("--user", is_flag=True, help="A service of this user alone, under the user's own service manager.")
@click.option("--uninstall", is_flag=True, help="Stop the service, and remove what was installed.")
@click.option("--dry-run", is_flag=True, help="Print every step, and take none.")
def install(user: bool, uninstall: bool, dry_run: bool) -> None:
    """Installs tensord as a systemd service, or removes it.

    Writes the units, the configuration file and, for the host, the files that make the user tensord and the folder of
    the sockets; checks them; and prints how to start the service. The units run the `tensord` beside this tensorctl. A
    second run brings the units up to date. A configuration file that is there is kept.

    --uninstall leaves the stored entries, the user tensord and a configuration file that was changed.
    """
    home = _home() if user else None
    places = files.user_places(home, os.environ) if home is not None else files.system_places()
    program = Path(sys.executable).with_name("tensord")
    if not dry_run:
        _refuse(refusals.of_user(os.environ) if user else refusals.of_system())
    if uninstall:
        steps = _removal(places, files.texts(places, files.start_word(program, home)))
    else:
        _refuse(refusals.of_program(program) or (None if user else refusals.of_service_user(program)))
        steps = _installation(places, program, home)
    if all(step.says.startswith("run ") for step in steps):
        click.echo("every file is in place already")
    for step in steps:
        click.echo(f"would {step.says}" if dry_run else step.says)
        if not dry_run:
            step.carry_out()
    if not dry_run:
        click.echo(_after_removal(places) if uninstall else _after_installation(places, program))


def _home() -> Path:
    try:
        return home_folder(os.environ)
    except KeyError:
        raise click.UsageError(f"HOME is not set, and uid {os.getuid()} has no home folder: set HOME") from None


def _installation(places: UnitPlaces, program: Path, home: Path | None) -> list[PlannedStep]:
    """`home`: the user's home folder; None for the host's service."""
    steps = plan.installation(files.texts(places, files.start_word(program, home)), places.config)
    if places.system:
        sysusers, tmpfiles = map(str, places.beside.values())
        steps += [run("systemd-sysusers", sysusers), run("systemd-tmpfiles", "--create", tmpfiles)]
    scope = "--system" if places.system else "--user"
    units = (str(places.units / name) for name in (SERVICE, *SOCKETS))
    return [
        *steps,
        run(*places.systemctl("daemon-reload")),
        run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", scope, *units),
        run(str(program), "--check-config", "--config", str(places.config)),
    ]


def _removal(places: UnitPlaces, texts: Mapping[Path, str]) -> list[PlannedStep]:
    # The sockets first: a connection would start the service again.
    units = sorted((path.name for path in texts if path.parent == places.units), key=lambda name: name == SERVICE)
    if not any((places.units / name).exists() for name in units):
        raise click.ClickException(
            f"{places.units / SERVICE} is not there: `tensorctl install` has installed nothing "
            + ("for the host; --user for a service of one user" if places.system else "for this user")
        )
    return [
        run(*places.systemctl("disable", "--now", *units)),
        *plan.removal(texts, places.config),
        run(*places.systemctl("daemon-reload")),
        run(*places.systemctl("reset-failed", *units), may_fail=True),
    ]


def _after_installation(places: UnitPlaces, program: Path) -> str:
    manage = " ".join(places.systemctl())
    lines = [
        "",
        "installed; start it, and look at it:",
        f"  {manage} enable --now {SERVICE}",
        f"  {program.with_name('tensorctl')} status",
        f"a service that runs already takes the new files by: {manage} restart {SERVICE}",
    ]
    if places.system:
        lines.append("users of the group tensord can connect: usermod -aG tensord NAME")
    elif not facts.lingers(os.geteuid()):
        lines.append("logind frees the entries at your last logout, unless you linger: loginctl enable-linger")
    return "\n".join(lines)


def _after_removal(places: UnitPlaces) -> str:
    program = Path(sys.executable).with_name("tensorctl")
    purge = f"{program} purge --yes"
    if places.system:
        purge = f"runuser -u tensord -- {program} purge --yes --instance system"
    return f"\nremoved; the stored entries stay in memory until this frees them:\n  {purge}"


def _refuse(why: str | None) -> None:
    if why is not None:
        raise click.ClickException(why)
