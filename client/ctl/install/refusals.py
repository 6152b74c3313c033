"""Why the service cannot be installed here, in one sentence with what to do. Reads the machine, and changes nothing.

Owns: the conditions. Does not own: what is installed (files.py).
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from .files import SHIPPED

_BOOTED: Final = Path("/run/systemd/system")
_HIDDEN: Final = (Path("/home"), Path("/root"), Path("/run/user"), Path("/tmp"), Path("/var/tmp"))
"""What the service cannot see (ProtectHome=, PrivateTmp=)."""
_OWN_VENV: Final = "install it with the distribution's Python: python3 -m venv /opt/tensord"


def of_system() -> str | None:
    """Why this process cannot install the host's service."""
    if os.geteuid() != 0:
        return "the service of the host needs root: use sudo, or --user for a service of your own"
    if not _BOOTED.is_dir():
        return f"{_BOOTED} is not there, so no systemd runs this machine: run `tensord` by itself, or in a container"
    return None


def of_user(environ: Mapping[str, str]) -> str | None:
    """Why this process cannot install a service for its user."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if not runtime or not Path(runtime, "systemd").is_dir():
        return (
            "no service manager of this user runs here: log in as the user (not by su or sudo), or have root run "
            f"`loginctl enable-linger` and set XDG_RUNTIME_DIR=/run/user/{os.geteuid()}"
        )
    return None


def of_program(program: Path) -> str | None:
    """Why no service can run `program`."""
    if not os.access(program, os.X_OK):
        return f"{program} is not there: run the tensorctl of the environment in which tensord is installed"
    return None


def of_service_user(program: Path) -> str | None:
    """Why the user tensord cannot run `program` within the host's service."""
    for path in _needed(program):
        hidden = next((folder for folder in _HIDDEN if path.is_relative_to(folder)), None)
        if hidden is not None:
            return f"the service cannot see {path}, because {hidden} is hidden from it: {_OWN_VENV}"
        closed = next((each for each in (path, *path.parents) if not _open_to_all(each)), None)
        if closed is not None:
            return f"the user tensord cannot read {closed}: chmod -R a+rX it, or {_OWN_VENV}"
    return None


def _needed(program: Path) -> Iterable[Path]:
    """What the daemon reads: the program, its environment, its Python, and the package."""
    interpreter = Path(sys.executable)
    return program, interpreter, interpreter.resolve(), Path(sys.base_prefix).resolve(), SHIPPED.resolve()


def _open_to_all(path: Path) -> bool:
    mode = path.stat().st_mode
    return bool(mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH))
