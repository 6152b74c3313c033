"""Facts for the checks, read from this machine. Changes nothing. Facts that cannot be read are left out; no exception
is raised."""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
from pathlib import Path
from typing import Final

from ....shm.ring import segments
from ....shm.ring.cgroups import cgroups
from ..orders.leftovers import instances
from .checks import RingRoom, Serving

_LISTENS: Final = "00010000"
"""The flags of a listening socket in /proc/net/unix (__SO_ACCEPTCON)."""
_PRINTED_S: Final = 5.0


def mode(path: Path) -> int:
    """A file's mode; 0 if it is missing or not accessible."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def nobody_listens(path: Path) -> bool:
    """Whether a connection to this path reaches nobody: there is no socket, or one that a process left behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # its backlog is full, or it is not for this user
    return False


def without_file(path: Path, proc: Path = Path("/proc")) -> list[Serving]:
    """The daemons that may listen on a socket that was bound to `path`. Those whose sockets this user may not see are
    left out if one is found that does."""
    names = {str(path), str(path.absolute())}
    rows = [line.split(maxsplit=7) for line in _text(proc / "net/unix").splitlines()]
    bound = {row[6] for row in rows if len(row) == 8 and row[7] in names and row[3] == _LISTENS}
    found: dict[bool, list[Serving]] = {True: [], False: []}
    for instance in instances() if bound else ():
        pid = segments.serving_pid(instance, proc)
        held = None if pid is None else _sockets_of(proc / str(pid))
        if pid is not None and (held is None or held & bound):
            found[held is not None].append(Serving(instance, pid))
    return found[True] or found[False]


def room(ring_bytes: int, ready_bytes: int, pid: int | None) -> RingRoom:
    """The memory of the machine, for a ring of `ring_bytes`. `pid`: the process whose cgroup counts; None for this
    one."""
    meminfo = _text(Path("/proc/meminfo"))
    try:
        shm = os.statvfs(segments.SHM_FOLDER)
        total_bytes, free_bytes = shm.f_blocks * shm.f_frsize, segments.shm_free_bytes()
        problem = "/dev/shm is mounted read-only" if shm.f_flag & os.ST_RDONLY else ""
    except OSError as error:
        total_bytes, free_bytes, problem = 0, 0, f"/dev/shm cannot be used ({error.strerror})"
    if not problem and not os.access(segments.SHM_FOLDER, os.W_OK | os.X_OK):
        problem = "/dev/shm does not let this user make files"
    return RingRoom(
        ring_bytes,
        ready_bytes,
        total_bytes,
        free_bytes,
        _kib(meminfo, "MemAvailable"),
        _kib(meminfo, "MemTotal"),
        tuple(cgroups(pid)),
        problem,
    )


def logind_configuration(root: Path = Path("/")) -> str:
    """logind's configuration, of all its files, the most important last; empty if logind does not run here."""
    if not (root / "run/systemd/seats").is_dir():
        return ""
    words = ("systemd-analyze", "cat-config", "systemd/logind.conf")
    try:
        asked = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PRINTED_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return asked.stdout or "unknown"


def lingers(uid: int, root: Path = Path("/")) -> bool:
    """Whether a user's services continue after logout."""
    try:
        return (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists()
    except (KeyError, OSError):
        return False


def hardware(root: Path = Path("/")) -> dict[str, bool]:
    """By extra ("nvidia", "amd"): whether the driver of such a GPU is loaded."""
    nvidia = (root / "dev/nvidiactl").exists() or (root / "proc/driver/nvidia").exists()
    return {"nvidia": nvidia, "amd": (root / "dev/kfd").exists()}


def _sockets_of(process: Path) -> set[str] | None:
    """The inodes of a process's sockets; None if this user may not see them."""
    try:
        links = [os.readlink(each) for each in (process / "fd").iterdir()]
    except OSError:
        return None
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}


def _kib(meminfo: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
