"""The processes that use a GPU, as a reading shows them beside the used bytes.

Owns: the names of processes, and the form of the list. Does not own the calls of a library (nvidia).

A driver tells pids of the host. Where the daemon runs in a pid namespace of its own, as in a container, such a pid is
another process there or none: then the process is not `seen`, and has no name. Neither has a process that is hidden
from the daemon's user (hidepid, ProtectProc).

Invariants: nothing here raises for what a process does meanwhile, as end. At most PROCESSES_MAX processes of a GPU are
listed, those with the most bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

PROCESSES_MAX: Final = 64
_NAME_BYTES_MAX: Final = 64
_HOST_NAMESPACE: Final = "pid:[4026531836]"
"""The first pid namespace of a kernel: its number is fixed (PROC_PID_INIT_INO)."""


def listed(used: Mapping[int, int | None], root: Path = Path("/")) -> dict[str, Any]:
    """The fields for status of a GPU's processes. `seen`: the pid is that of the same process for the daemon.

    Args:
        used: bytes by the pid of the host; None if the driver does not tell them.
        root: the folder that has /proc.
    """
    most = sorted(used.items(), key=lambda each: (-(each[1] or 0), each[0]))[:PROCESSES_MAX]
    seen = _sees_pids_of_the_host(root)
    return {
        "processes": [
            {"pid": pid, "name": _name(root, pid) if seen else None, "bytes": size_bytes, "seen": seen}
            for pid, size_bytes in most
        ]
    }


def _sees_pids_of_the_host(root: Path) -> bool:
    try:
        return os.readlink(root / "proc/self/ns/pid") == _HOST_NAMESPACE
    except OSError:
        return False


def _name(root: Path, pid: int) -> str | None:
    """The name of a process; None if there is none of that pid."""
    try:
        with (root / f"proc/{pid}/comm").open("rb") as file:
            return file.read(_NAME_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return None
