"""The memory limits of a process's cgroup, and of all cgroups above it.

Owns: the way from a process to the folders of its cgroups (version 2, and the memory controller of version 1), and
their limits. Does not own: what a limit means for a ring.
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
_UNLIMITED_BYTES: Final = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest number of whole pages."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A memory limit on a process's cgroup or one above it. `used_bytes` includes the ring's pages."""

    path: str
    limit_bytes: int
    used_bytes: int


def cgroup_folders(membership: str, root: Path = ROOT) -> Iterator[Path]:
    """The folder of a process's cgroup of version 2, then those above it up to `root`.

    Args:
        membership: the text of /proc/PID/cgroup.
    """
    own = re.search(r"^0::/(.*)$", membership, re.MULTILINE)
    return _upwards(own[1] if own else "", root)


def _upwards(own: str, root: Path) -> Iterator[Path]:
    folder = root / own
    for place in (folder, *folder.parents):
        yield place
        if place == root:
            return


def cgroups(pid: int | None = None, root: Path = ROOT, proc: Path = PROC) -> Iterator[Cgroup]:
    """Every memory limit that applies to a process, by default this one, from its own cgroup upwards. Limits that
    cannot be read are left out."""
    membership = _text(proc / (str(pid) if pid else "self") / "cgroup")
    for folder in cgroup_folders(membership, root):
        yield from _limit(folder, root, "memory.max", "memory.current")
    own = re.search(r"^\d+:(?:[^:\n]*,)?memory(?:,[^:\n]*)?:/(.*)$", membership, re.MULTILINE)
    if own is not None:
        for folder in _upwards(own[1], root / "memory"):
            yield from _limit(folder, root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")


def _limit(folder: Path, root: Path, *names: str) -> Iterator[Cgroup]:
    limit, used = (_text(folder / name).strip() for name in names)
    if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED_BYTES:
        yield Cgroup("/" + str(folder.relative_to(root)).removeprefix("."), int(limit), int(used))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
