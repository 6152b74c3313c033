"""The files of the service: what the package carries, and where each belongs, for the host or for one user.

Owns: the places, and the program's path in the units. Does not own: the texts (systemd/), nor what is on the disk
(plan.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tensord

SHIPPED: Final = Path(tensord.__file__).parent / "systemd"
SERVICE: Final = "tensord.service"
_SHIPPED_START: Final = {True: "/opt/tensord/bin/tensord", False: "%h/.local/bin/tensord"}
"""What ExecStart= names in the package's units, by whether they are the system's."""
_SYSTEM_UNITS: Final = Path("etc/systemd/system")
_SYSTEM_RECORD: Final = Path("var/lib/tensord/installed.json")
_USER_RECORD: Final = "tensord/installed.json"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the files of one service belong. `record`: what was installed, for the next install and for --uninstall."""

    system: bool
    units: Path
    config: Path
    record: Path
    sysusers: Path | None = None
    tmpfiles: Path | None = None

    @property
    def own_folders(self) -> tuple[Path, Path]:
        """The folders that hold nothing but tensord's files."""
        return self.config.parent, self.record.parent

    def systemctl(self, *words: str) -> tuple[str, ...]:
        """A command of the service manager."""
        return ("systemctl", *(() if self.system else ("--user",)), *words)


def system_places(root: Path = Path("/")) -> Places:
    """Those of the host's service, below `root`."""
    return Places(
        system=True,
        units=root / _SYSTEM_UNITS,
        config=root / "etc/tensord/tensord.toml",
        record=root / _SYSTEM_RECORD,
        sysusers=root / "etc/sysusers.d/tensord.conf",
        tmpfiles=root / "etc/tmpfiles.d/tensord.conf",
    )


def user_places(home: Path, environ: Mapping[str, str]) -> Places:
    """Those of one user's service."""
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local/state")
    return Places(
        system=False,
        units=config / "systemd/user",
        config=config / "tensord/tensord.toml",
        record=state / _USER_RECORD,
    )


def texts(places: Places, program: str, folder: Path = SHIPPED) -> dict[Path, str]:
    """The text of every file by its place; `program`: what ExecStart= names (see `start_word`)."""
    units = sorted((folder if places.system else folder / "user").glob("tensord*.*"))
    found = {places.units / unit.name: unit.read_text() for unit in units if unit.suffix != ".toml"}
    shipped, service = _SHIPPED_START[places.system], places.units / SERVICE
    for line in (f"ExecStart={shipped}\n", f"ExecReload={_ctl_of(shipped)} reload\n"):
        assert line in found[service], f"{SERVICE} of the package has no line {line!r}"
        run = line.replace(_ctl_of(shipped), _ctl_of(program)).replace(shipped, program)
        found[service] = found[service].replace(line, run)
    found[places.config] = (folder / "tensord.toml").read_text()
    if places.sysusers is not None:
        found[places.sysusers] = (folder / "sysusers.d/tensord.conf").read_text()
    if places.tmpfiles is not None:
        found[places.tmpfiles] = (folder / "tmpfiles.d/tensord.conf").read_text()
    return found


def _ctl_of(program: str) -> str:
    """The word for tensorctl beside `program`, a word for tensord."""
    return re.sub(r'tensord("?)$', r"tensorctl\1", program)


def start_word(program: Path, home: Path | None = None) -> str:
    """What ExecStart= names for `program`. A link to it in ~/.local/bin, as pipx makes it, is named in its place: it
    stays right when pipx moves its environments. `home` None: the system's service."""
    if home is not None:
        link = home / ".local/bin/tensord"
        if link.exists() and link.resolve() == program.resolve():
            return _SHIPPED_START[False]
    word = str(program).replace("%", "%%")
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' if set(word) & set(" \t'\"\\") else word
