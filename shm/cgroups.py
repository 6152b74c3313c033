"""The memory limits of a process's cgroup, and of all cgroups above it.

Owns: the way from a process to the folders of its cgroups (cgroup v2), and their limits. Does not own: what a limit
means for a ring.
Invariants: changes nothing; reading raises no exception.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory limit on a process's cgroup or one above it. `used_bytes` includes the ring's pages."""

    path: str
    limit_bytes: int
    used_bytes: int


def cgroup_folders(membership: str, root: Path = ROOT) -> Iterator[Path]:
    """The folder of a process's cgroup, then those above it up to `root`.

    Args:
        membership: the text of /proc/PID/cgroup.
    """
    own = re.search(r"^0::/(.*)$", membership, re.MULTILINE)
    folder = root / (own[1] if own else "")
    for place in (folder, *folder.parents):
        yield place
        if place == root:
            return


def cgroups(pid: int | None = None, root: Path = ROOT, proc: Path = PROC) -> Iterator[Cgroup]:
    """Every memory limit that applies to a process, by default this one, from its own cgroup upwards. Limits that
    cannot be read are left out."""
    for folder in cgroup_folders(_text(proc / (str(pid) if pid else "self") / "cgroup"), root):
        limit, used = (_text(folder / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdigit() and used.isdigit():
            yield Cgroup("/" + str(folder.relative_to(root)).removeprefix("."), int(limit), int(used))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
