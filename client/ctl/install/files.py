"""The files of the service: what the package carries, and where each belongs, for the host or for one user.

Owns: the places, and the program's path in the units. Does not own: the texts (systemd/), nor what is on the disk
(plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import tensord

SHIPPED: Final = Path(tensord.__file__).parent / "systemd"
SERVICE: Final = "tensord.service"
_STARTS: Final = {True: "/opt/tensord/bin/tensord", False: "%h/.local/bin/tensord"}
"""What ExecStart= names in the package's units, by whether they are the system's."""


class UnitPlaces(NamedTuple):
    """Where the files of one service belong. `beside`: other files of the package, by their names in it."""

    system: bool
    units: Path
    config: Path
    beside: Mapping[str, Path]

    def systemctl(self, *words: str) -> tuple[str, ...]:
        """A command of the service manager."""
        return ("systemctl", *(() if self.system else ("--user",)), *words)


def system_places(root: Path = Path("/")) -> UnitPlaces:
    """Those of the host's service. `root` other than /: a stand-in for the host."""
    beside = {f"{kind}.d/tensord.conf": root / f"etc/{kind}.d/tensord.conf" for kind in ("sysusers", "tmpfiles")}
    return UnitPlaces(True, root / "etc/systemd/system", root / "etc/tensord/tensord.toml", beside)


def user_places(home: Path, environ: Mapping[str, str]) -> UnitPlaces:
    """Those of one user's service."""
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return UnitPlaces(False, config / "systemd/user", config / "tensord/tensord.toml", {})


def texts(places: UnitPlaces, program: str, folder: Path = SHIPPED) -> dict[Path, str]:
    """The text of every file by its place; `program`: what ExecStart= names (see `start_word`)."""
    units = sorted((folder if places.system else folder / "user").glob("tensord*.*"))
    found = {places.units / unit.name: unit.read_text() for unit in units if unit.suffix != ".toml"}
    shipped, service = _STARTS[places.system], places.units / SERVICE
    # The words of both lines end alike: a path that has to be quoted is quoted whole.
    ctl = program.removesuffix('"').removesuffix("tensord") + "tensorctl" + '"' * program.endswith('"')
    for before, line in (
        (f"ExecStart={shipped}\n", f"ExecStart={program}\n"),
        (f"ExecReload={shipped.removesuffix('tensord')}tensorctl reload\n", f"ExecReload={ctl} reload\n"),
    ):
        assert before in found[service], f"{SERVICE} of the package has no line {before!r}"
        found[service] = found[service].replace(before, line)
    for name, path in {"tensord.toml": places.config, **places.beside}.items():
        found[path] = (folder / name).read_text()
    return found


def start_word(program: Path, home: Path | None = None) -> str:
    """What ExecStart= names for `program`. A link to it in ~/.local/bin, as pipx makes it, is named in its place: it
    stays right when pipx moves its environments. `home` None: the system's service."""
    if home is not None:
        link = home / ".local/bin/tensord"
        if link.exists() and link.resolve() == program.resolve():
            return _STARTS[False]
    word = str(program).replace("%", "%%")
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' if set(word) & set(" \t'\"\\") else word
