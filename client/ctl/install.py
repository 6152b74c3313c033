"""`install`: tensord as a systemd service of the host, or of one user. The files' texts are in systemd/.

The units are the package's: they are written anew, and changed by `systemctl edit`, which keeps a file of its own. The
configuration file is the operator's: one that is there is kept.

Invariant: every step is printed before it is taken.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import click

import tensord

from ...ipc.places import home_folder
from .doctor import lingers

SHIPPED: Final = Path(tensord.__file__).parent / "systemd"
SERVICE: Final = "tensord.service"
SOCKETS: Final = ("tensord.socket", "tensord-status.socket")
_SYSTEM_START: Final = "/opt/tensord/bin/tensord"
_USER_START: Final = "%h/.local/bin/tensord"
"""What ExecStart= names in the package's units, the host's and a user's."""
_BOOTED: Final = Path("/run/systemd/system")
_HIDDEN: Final = (Path("/home"), Path("/root"), Path("/run/user"), Path("/tmp"), Path("/var/tmp"))
"""What the service cannot see (ProtectHome=, PrivateTmp=)."""
_OWN_VENV: Final = "install it with the distribution's Python: python3 -m venv /opt/tensord"


class UnitPlaces(NamedTuple):
    """Where the files of one service belong. `beside`: other files of the package, by their names in it; none for a
    user's service."""

    units: Path
    config: Path
    beside: Mapping[str, Path]

    @property
    def system(self) -> bool:
        return bool(self.beside)

    def systemctl(self, *words: str) -> tuple[str, ...]:
        return ("systemctl", *(() if self.system else ("--user",)), *words)


def system_places(root: Path = Path("/")) -> UnitPlaces:
    """Those of the host's service. `root` other than /: a stand-in for the host."""
    beside = {f"{kind}.d/tensord.conf": root / f"etc/{kind}.d/tensord.conf" for kind in ("sysusers", "tmpfiles")}
    return UnitPlaces(root / "etc/systemd/system", root / "etc/tensord/tensord.toml", beside)


def user_places(home: Path, environ: Mapping[str, str]) -> UnitPlaces:
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return UnitPlaces(config / "systemd/user", config / "tensord/tensord.toml", {})


def texts(places: UnitPlaces, program: str) -> dict[Path, str]:
    """The text of every file by its place. `program`: see `start_word`."""
    units = sorted((SHIPPED if places.system else SHIPPED / "user").glob("tensord*.*"))
    found = {places.units / unit.name: unit.read_text() for unit in units if unit.suffix != ".toml"}
    shipped, service = _SYSTEM_START if places.system else _USER_START, places.units / SERVICE
    # The words of both lines end alike: a path that has to be quoted is quoted whole.
    ctl = program.removesuffix('"').removesuffix("tensord") + "tensorctl" + '"' * program.endswith('"')
    for before, line in (
        (f"ExecStart={shipped}\n", f"ExecStart={program}\n"),
        (f"ExecReload={shipped.removesuffix('tensord')}tensorctl reload\n", f"ExecReload={ctl} reload\n"),
    ):
        assert before in found[service], f"{SERVICE} of the package has no line {before!r}"
        found[service] = found[service].replace(before, line)
    for name, path in {"tensord.toml": places.config, **places.beside}.items():
        found[path] = (SHIPPED / name).read_text()
    return found


def start_word(program: Path, home: Path | None = None) -> str:
    """What ExecStart= names for `program`. A link to it in ~/.local/bin, as pipx makes it, is named in its place: it
    stays right when pipx moves its environments. `home` None: the system's service."""
    if home is not None:
        link = home / ".local/bin/tensord"
        if link.exists() and link.resolve() == program.resolve():
            return _USER_START
    word = str(program).replace("%", "%%")
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' if set(word) & set(" \t'\"\\") else word


def write(texts: Mapping[Path, str], config: Path) -> None:
    """Puts the files in place. `config`: the one that is the operator's."""
    wanted = [path for path, text in texts.items() if not (path.exists() if path == config else _is(path, text))]
    for path in wanted:
        click.echo(f"write {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
        path.chmod(0o644)
    if not wanted:
        click.echo("every file is in place already")


def remove(texts: Mapping[Path, str], config: Path) -> None:
    """Removes the files, except a configuration file that was changed, and the configuration's folder if it is empty
    then."""
    for path, text in texts.items():
        if path == config and path.exists() and not _is(path, text):
            click.echo(f"keep {path}: it was changed here; remove it by hand")
        elif path.exists():
            click.echo(f"remove {path}")
            path.unlink()
    with suppress(OSError):
        config.parent.rmdir()


def run(*words: str, may_fail: bool = False) -> None:
    command = " ".join(words)
    click.echo(f"run {command}")
    # TENSORD_* variables of whoever installs are not the service's.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, env=environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise click.ClickException(f"{command}: {error}; mend it, and run this command again") from None
    if done.returncode and not may_fail:
        said = f"ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip() or 'it said nothing'}"
        raise click.ClickException(f"{command}: {said}; mend it, and run this command again")


def lay(places: UnitPlaces, program: Path, start: str) -> None:
    """Lays the service's files, and has them checked. `start`: what ExecStart= names for `program`."""
    write(texts(places, start), places.config)
    if places.system:
        sysusers, tmpfiles = map(str, places.beside.values())
        run("systemd-sysusers", sysusers)
        run("systemd-tmpfiles", "--create", tmpfiles)
    run(*places.systemctl("daemon-reload"))
    scope = "--system" if places.system else "--user"
    units = (str(places.units / name) for name in (SERVICE, *SOCKETS))
    run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", scope, *units)
    run(str(program), "--check-config", "--config", str(places.config))


def take_away(places: UnitPlaces, start: str) -> None:
    files = texts(places, start)
    # The sockets first: a connection would start the service again.
    units = sorted((path.name for path in files if path.parent == places.units), key=lambda name: name == SERVICE)
    if not any((places.units / name).exists() for name in units):
        raise click.ClickException(
            f"{places.units / SERVICE} is not there: `tensorctl install` has installed nothing "
            + ("for the host; --user for a service of one user" if places.system else "for this user")
        )
    run(*places.systemctl("disable", "--now", *units))
    remove(files, places.config)
    run(*places.systemctl("daemon-reload"))
    run(*places.systemctl("reset-failed", *units), may_fail=True)


def no_manager(*, user: bool) -> str | None:
    """Why this process cannot install the host's service, or one for its user."""
    if user:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if not runtime or not Path(runtime, "systemd").is_dir():
            return (
                "no service manager of this user runs here: log in as the user (not by su or sudo), or have root run "
                f"`loginctl enable-linger` and set XDG_RUNTIME_DIR=/run/user/{os.geteuid()}"
            )
    elif os.geteuid() != 0:
        return "the service of the host needs root: use sudo, or --user for a service of your own"
    elif not _BOOTED.is_dir():
        return f"{_BOOTED} is not there, so no systemd runs this machine: run `tensord` by itself, or in a container"
    return None


def unusable(program: Path, *, system: bool) -> str | None:
    """Why no service, or not the user tensord within the host's, can run `program`."""
    if not os.access(program, os.X_OK):
        return f"{program} is not there: run the tensorctl of the environment in which tensord is installed"
    interpreter = Path(sys.executable)
    # What the daemon reads: the program, its environment, its Python, and the package.
    needed = program, interpreter, interpreter.resolve(), Path(sys.base_prefix).resolve(), SHIPPED.resolve()
    for path in needed if system else ():
        hidden = next((folder for folder in _HIDDEN if path.is_relative_to(folder)), None)
        if hidden is not None:
            return f"the service cannot see {path}, because {hidden} is hidden from it: {_OWN_VENV}"
        closed = next((each for each in (path, *path.parents) if not _open_to_all(each)), None)
        if closed is not None:
            return f"the user tensord cannot read {closed}: chmod -R a+rX it, or {_OWN_VENV}"
    return None


@click.command()
@click.option("--user", is_flag=True, help="A service of this user alone, under the user's own service manager.")
@click.option("--uninstall", is_flag=True, help="Stop the service, and remove what was installed.")
def install(user: bool, uninstall: bool) -> None:
    """Installs tensord as a systemd service, or removes it.

    Writes the units, the configuration file and, for the host, the files that make the user tensord and the folder of
    the sockets; checks them; and prints how to start the service. The units run the `tensord` beside this tensorctl. A
    second run brings the units up to date. A configuration file that is there is kept.

    --uninstall leaves the stored entries, the user tensord and a configuration file that was changed.
    """
    home = home_folder(os.environ) if user else None
    places = system_places() if home is None else user_places(home, os.environ)
    program = Path(sys.executable).with_name("tensord")
    start = start_word(program, home)
    why = no_manager(user=user) or (None if uninstall else unusable(program, system=not user))
    if why is not None:
        raise click.ClickException(why)
    if uninstall:
        take_away(places, start)
        click.echo(_after_removal(places))
    else:
        lay(places, program, start)
        click.echo(_after_installation(places, program))


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
    elif not lingers(os.geteuid()):
        lines.append("logind frees the entries at your last logout, unless you linger: loginctl enable-linger")
    return "\n".join(lines)


def _after_removal(places: UnitPlaces) -> str:
    program = Path(sys.executable).with_name("tensorctl")
    purge = f"{program} purge --yes"
    if places.system:
        purge = f"runuser -u tensord -- {program} purge --yes --instance system"
    return f"\nremoved; the stored entries stay in memory until this frees them:\n  {purge}"


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8", errors="surrogateescape") == text


def _open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH))
